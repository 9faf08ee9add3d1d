//! What others see of a sandbox.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmm_protocol::GenerationId;

use super::{Error, Process, Sandbox, files};

/// Bytes of the lock file, blanks included: one write replaces all of it.
pub(super) const LOCK_BYTES: usize = 512;

/// How far a life is, as its own process says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its agent is not ready yet.
    Starting,
    /// Commands can be run in it; a guest without an agent runs.
    Ready,
    /// It is on its way down.
    Stopping,
}

impl Phase {
    /// Its name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Stopping => "stopping",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Starting, Self::Ready, Self::Stopping]
            .into_iter()
            .find(|phase| phase.name() == text)
    }
}

/// What a sandbox is doing, as `ps` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A process runs it.
    Alive(Phase),
    /// Its process was killed, or crashed: nothing was recorded.
    Dead,
    /// Its last life has ended, with a record.
    Ended,
}

impl State {
    /// Its name in listings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Alive(phase) => phase.name(),
            Self::Dead => "dead",
            Self::Ended => "ended",
        }
    }

    /// True while a process runs it.
    #[must_use]
    pub fn is_alive(self) -> bool {
        matches!(self, Self::Alive(_))
    }
}

/// Who holds a sandbox's lock, or held it last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process.
    pub process: Process,
    /// Its generation, `<counter>-<id>`.
    pub generation: GenerationId,
    /// How far it was.
    pub phase: Phase,
}

impl Holder {
    /// Reads a lock file; `None` if nobody has written to it yet.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Damaged`].
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let mut text = Vec::new();
        File::open(path)
            .and_then(|file| file.take(LOCK_BYTES as u64).read_to_end(&mut text))
            .map_err(Error::file("read", path))?;
        if text.iter().all(u8::is_ascii_whitespace) {
            return Ok(None);
        }
        let damaged = |why: &str| Error::Damaged {
            path: path.to_owned(),
            why: why.to_owned(),
        };
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| damaged(&error.to_string()))?;
        let holder = Self {
            process: process(&value).ok_or_else(|| damaged("no pid or start_time"))?,
            generation: value["generation"]
                .as_str()
                .and_then(generation)
                .ok_or_else(|| damaged("no generation"))?,
            phase: value["state"]
                .as_str()
                .and_then(Phase::parse)
                .ok_or_else(|| damaged("no state"))?,
        };
        Ok(Some(holder))
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "process {} ({}, generation {})",
            self.process.pid,
            self.phase.name(),
            self.generation
        )
    }
}

/// The present life as its `current.json` has it: all that a client needs.
#[derive(Clone)]
pub struct Current {
    /// Its generation.
    pub generation: GenerationId,
    /// The secret part; never shown.
    pub nonce: [u8; 16],
    /// Where its sockets are; `None` until it is ready.
    pub folder: Option<PathBuf>,
}

impl Current {
    /// Reads a `current.json`; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Damaged`].
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let Some(value) = files::read_json(path)? else {
            return Ok(None);
        };
        let parse = || {
            let generation = &value["generation"];
            Some(Self {
                generation: GenerationId {
                    counter: generation["counter"].as_u64()?,
                    public_id: hex(generation["id"].as_str()?)?,
                },
                nonce: hex(value["nonce"].as_str()?)?.to_be_bytes(),
                folder: value["folder"].as_str().map(PathBuf::from),
            })
        };
        parse().map(Some).ok_or_else(|| Error::Damaged {
            path: path.to_owned(),
            why: "no generation or nonce".to_owned(),
        })
    }
}

/// A sandbox at one moment.
#[derive(Clone, Debug)]
pub struct View {
    /// What it is doing.
    pub state: State,
    /// Who runs it, or ran it last; `None` before its first life has begun.
    pub holder: Option<Holder>,
    /// What it was last started with.
    pub config: Option<Value>,
    /// How the last life ended, if it was recorded.
    pub last: Option<Value>,
}

impl Sandbox {
    /// Looks at it without disturbing it.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Damaged`].
    pub fn view(&self) -> Result<View, Error> {
        let holder = Holder::read(&self.file("lock"))?;
        let alive = holder
            .as_ref()
            .filter(|holder| holder.process.is_alive())
            .map(|holder| State::Alive(holder.phase));
        // After the look at the process, which leaves its record before it ends.
        let last = files::read_json(&self.file("last.json"))?;
        let state = alive.unwrap_or(if last.is_some() {
            State::Ended
        } else {
            State::Dead
        });
        Ok(View {
            state,
            holder,
            config: files::read_json(&self.file("config.json"))?,
            last,
        })
    }
}

fn process(value: &Value) -> Option<Process> {
    Some(Process {
        pid: u32::try_from(value["pid"].as_u64()?).ok()?,
        start_time: value["start_time"].as_u64()?,
        boot: value["boot"].as_str().and_then(hex),
    })
}

/// Reads `<counter>-<32 hex digits>`.
fn generation(text: &str) -> Option<GenerationId> {
    let (counter, id) = text.split_once('-')?;
    Some(GenerationId {
        counter: counter.parse().ok()?,
        public_id: hex(id)?,
    })
}

fn hex(text: &str) -> Option<u128> {
    let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| u128::from_str_radix(text, 16).ok())?
}
