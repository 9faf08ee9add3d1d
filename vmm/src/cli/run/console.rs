//! `--no-agent`: the guest's serial console on our stdout until the guest ends.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::channel;

use vmm_devices::console::ConsoleLog;
use vmm_events::{Answer, Interest, Poller, Waker};

use super::Error;
use crate::cli::signals::Signals;
use crate::cli::status;
use crate::console::PassOn;
use crate::exits::ExitReason;
use crate::machine::{Config, Handle, Machine};
use crate::supervisor::ended;

#[derive(Clone, Copy)]
enum Token {
    Signal,
    Ended,
}

/// Boots the machine and streams its console; the exit status.
pub fn run(config: &Config) -> Result<u8, Error> {
    let signals = Signals::collect(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
        .map_err(|source| Error::Host("signals", source))?;
    let handle = Handle::new()?;
    let stdout = io::stdout()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|source| Error::Host("stdout", source))?;
    let log = ConsoleLog::default();
    let (failed, stdout_error) = channel();
    let on_error = {
        let handle = handle.clone();
        move |error| {
            let _ = failed.send(error);
            handle.stop();
        }
    };
    let console = PassOn::new(log.clone(), stdout, handle.ended().clone(), on_error);
    let machine = Machine::build_with(handle.clone(), config, Box::new(console))?;

    let mut poller = Poller::new()?;
    let _signals = poller.register(signals, Interest::READ, Token::Signal)?;
    let done = Waker::new()?;
    let _done = poller.register(done.clone(), Interest::READ, Token::Ended)?;
    let thread = machine
        .spawn(done)
        .map_err(|source| Error::Host("a thread", source))?;

    let mut signal = None;
    'wait: loop {
        poller.wait(None)?;
        while let Some(event) = poller.next_event() {
            poller.answer(&event, Answer::Handled);
            match event.token {
                Token::Ended => break 'wait,
                Token::Signal => {
                    let Some(number) = _signals.inner().next() else {
                        continue;
                    };
                    if signal.replace(number).is_some() {
                        // The second one: whatever still hangs is left to the kernel.
                        return Ok(status::signaled(number));
                    }
                    handle.stop();
                }
            }
        }
    }
    let reason = thread.join()?;
    if let Ok(error) = stdout_error.try_recv() {
        return Err(Error::Stdout(error));
    }
    match (ended(reason, &log), signal) {
        (ExitReason::Shutdown, _) => Ok(status::OK),
        (ExitReason::Stopped, Some(number)) => Ok(status::signaled(number)),
        (other, _) => Err(Error::Ended(other.to_string())),
    }
}
