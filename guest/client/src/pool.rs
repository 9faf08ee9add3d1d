//! Sessions that are used again: one for each sandbox and generation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_protocol::GenerationId;

use crate::connect::{ConnectError, Deadlines};
use crate::session::Session;
use crate::tag::GenerationTag;

/// Sessions kept unless [`Pool::with_capacity`] says otherwise.
const CAPACITY: usize = 64;

/// What a pool has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Sessions handed out that were there already.
    pub reused: u64,
    /// Sessions that were opened.
    pub connected: u64,
    /// Sessions of an older generation that were closed for a newer one.
    pub stale: u64,
    /// Sessions that were found lost and replaced.
    pub lost: u64,
    /// Sessions closed to make room.
    pub evicted: u64,
}

/// Sessions by sandbox and generation. Clones share it.
///
/// A session is handed out for the generation that was asked for and no other. The first request for
/// a newer generation of a sandbox closes what is there of the older ones; a request for an older
/// one than the pool has seen is refused at once as stale, without a connection.
///
/// ```no_run
/// use vmm_client::{Deadlines, GenerationTag, Pool};
/// use vmm_protocol::{ExecRequest, GenerationId};
///
/// let pool = Pool::default();
/// let tag = GenerationTag::new(GenerationId { counter: 7, public_id: 0xabcd << 112 }, [0; 16]);
/// let socket = "/run/vmm/box/g7-abcd0000/vsock.sock".as_ref();
/// for _ in 0..2 {
///     // The second time nothing is connected.
///     let session = pool.session("box", socket, &tag, &Deadlines::default())?;
///     session.exec(&ExecRequest::new(["true"]))?.wait();
/// }
/// assert_eq!(pool.counters().reused, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Pool {
    state: Arc<Mutex<State>>,
}

impl Default for Pool {
    fn default() -> Self {
        Self::with_capacity(CAPACITY)
    }
}

#[derive(Debug)]
struct State {
    sandboxes: BTreeMap<String, Entry>,
    capacity: usize,
    /// Grows with each use.
    clock: u64,
    counters: PoolCounters,
}

/// The newest generation that was seen of a sandbox.
#[derive(Debug)]
struct Entry {
    generation: GenerationId,
    session: Option<Session>,
    used: u64,
}

impl Pool {
    /// A pool of at most so many sandboxes, at least one.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let state = State {
            sandboxes: BTreeMap::new(),
            capacity: capacity.max(1),
            clock: 0,
            counters: PoolCounters::default(),
        };
        Self {
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// A session with the agent of a generation: one that is there, or a new one by its socket.
    ///
    /// # Errors
    /// [`ConnectError`]; [`ConnectError::Stale`] without a connection for a generation that the pool
    /// knows to be over.
    pub fn session(
        &self,
        sandbox: &str,
        socket: &Path,
        tag: &GenerationTag,
        deadlines: &Deadlines,
    ) -> Result<Session, ConnectError> {
        let socket: PathBuf = socket.to_owned();
        self.session_with(sandbox, tag, || Session::connect(&socket, tag, deadlines))
    }

    /// As [`Pool::session`], with sessions made in another way.
    ///
    /// # Errors
    /// As for [`Pool::session`].
    pub fn session_with(
        &self,
        sandbox: &str,
        tag: &GenerationTag,
        connect: impl FnOnce() -> Result<Session, ConnectError>,
    ) -> Result<Session, ConnectError> {
        if let Some(session) = self.lock().find(sandbox, tag)? {
            return Ok(session);
        }
        // Not under the lock: other sandboxes are not held up by one that does not answer.
        let session = connect()?;
        let mut state = self.lock();
        state.counters.connected += 1;
        state.keep(sandbox, tag, &session)?;
        Ok(session)
    }

    /// Forgets a sandbox, which must be done for one that was removed: made anew, it counts from one again. What is
    /// there of it is closed once nobody uses it any more.
    pub fn forget(&self, sandbox: &str) {
        self.lock().sandboxes.remove(sandbox);
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> PoolCounters {
        self.lock().counters
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is whole by itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The session that is there for a generation.
    fn find(
        &mut self,
        sandbox: &str,
        tag: &GenerationTag,
    ) -> Result<Option<Session>, ConnectError> {
        self.clock += 1;
        let Some(entry) = self.sandboxes.get_mut(sandbox) else {
            return Ok(None);
        };
        entry.check(tag)?;
        // A newer one is believed once it was reached.
        if entry.generation != tag.id() {
            return Ok(None);
        }
        entry.used = self.clock;
        match &entry.session {
            Some(session) if session.lost().is_none() => {
                self.counters.reused += 1;
                Ok(Some(session.clone()))
            }
            Some(_) => {
                self.counters.lost += 1;
                entry.session = None;
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// Keeps a new session, unless its generation is over by now.
    fn keep(
        &mut self,
        sandbox: &str,
        tag: &GenerationTag,
        session: &Session,
    ) -> Result<(), ConnectError> {
        self.clock += 1;
        if !self.sandboxes.contains_key(sandbox) && self.sandboxes.len() >= self.capacity {
            let oldest = self.sandboxes.iter().min_by_key(|(_, entry)| entry.used);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                self.sandboxes.remove(&name);
                self.counters.evicted += 1;
            }
        }
        let clock = self.clock;
        let entry = self
            .sandboxes
            .entry(sandbox.to_owned())
            .or_insert_with(|| Entry {
                generation: tag.id(),
                session: None,
                used: clock,
            });
        self.counters.stale += entry.advance(tag)?;
        entry.used = clock;
        // Two may have connected at once: the first one's stays, and the other lives for its own user.
        if entry
            .session
            .as_ref()
            .is_none_or(|kept| kept.lost().is_some())
        {
            entry.session = Some(session.clone());
        }
        Ok(())
    }
}

impl Entry {
    /// Refuses a generation that is over.
    fn check(&self, tag: &GenerationTag) -> Result<(), ConnectError> {
        let seen = self.generation.counter;
        if tag.id().counter >= seen {
            return Ok(());
        }
        Err(ConnectError::Stale {
            tag: *tag,
            message: format!("the pool has seen generation {seen}"),
        })
    }

    /// Goes on to a newer generation; how many sessions of an older one were closed for it.
    fn advance(&mut self, tag: &GenerationTag) -> Result<u64, ConnectError> {
        self.check(tag)?;
        if tag.id() == self.generation {
            return Ok(0);
        }
        self.generation = tag.id();
        let Some(old) = self.session.take() else {
            return Ok(0);
        };
        // Whoever still holds it is told at once.
        old.close();
        Ok(1)
    }
}
