//! Output that can be waited for.

use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use crate::patience;

/// Bytes written so far, and a way to wait for some. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Tap(Arc<(Mutex<State>, Condvar)>);

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    ended: bool,
}

impl Tap {
    /// A tap that a thread of its own fills from `source` until its end.
    pub fn on(mut source: impl Read + Send + 'static) -> Self {
        let tap = Self::default();
        let mut ours = tap.clone();
        std::thread::spawn(move || {
            let _ = io::copy(&mut source, &mut ours);
            ours.change(|state| state.ended = true);
        });
        tap
    }

    /// Waits until `text` has been written.
    ///
    /// # Panics
    /// When it has not come in time, or the source ended without it; says what came.
    pub fn wait_for(&self, text: &str) {
        self.wait(&format!("{text:?}"), |state| {
            contains(&state.bytes, text.as_bytes())
        });
    }

    /// Waits until at least `count` bytes have been written.
    ///
    /// # Panics
    /// As for [`Tap::wait_for`].
    pub fn wait_for_bytes(&self, count: usize) {
        self.wait(&format!("{count} bytes"), |state| {
            state.bytes.len() >= count
        });
    }

    /// Waits for the end of the source and returns all of it.
    ///
    /// # Panics
    /// When the source does not end in time.
    pub fn to_end(&self) -> Vec<u8> {
        let (lock, condition) = &*self.0;
        let deadline = Instant::now() + patience();
        let mut state = lock.lock().unwrap();
        while !state.ended {
            let rest = deadline.saturating_duration_since(Instant::now());
            assert!(
                !rest.is_zero(),
                "the output has not ended; so far: {}",
                text(&state.bytes)
            );
            state = condition.wait_timeout(state, rest).unwrap().0;
        }
        state.bytes.clone()
    }

    /// All of it so far, as text.
    pub fn text(&self) -> String {
        text(&self.0.0.lock().unwrap().bytes)
    }

    fn wait(&self, what: &str, came: impl Fn(&State) -> bool) {
        let (lock, condition) = &*self.0;
        let deadline = Instant::now() + patience();
        let mut state = lock.lock().unwrap();
        while !came(&state) {
            let rest = deadline.saturating_duration_since(Instant::now());
            if state.ended || rest.is_zero() {
                let (ended, there) = (state.ended, text(&state.bytes));
                // The thread that fills it goes on.
                drop(state);
                let why = if ended { "the output ended" } else { "in time" };
                panic!("{what} did not come ({why}); there is: {there}");
            }
            state = condition.wait_timeout(state, rest).unwrap().0;
        }
    }

    fn change(&self, how: impl FnOnce(&mut State)) {
        how(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
    }
}

impl Write for Tap {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.change(|state| state.bytes.extend_from_slice(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes
        .windows(part.len().max(1))
        .any(|window| window == part)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
