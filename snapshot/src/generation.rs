//! One life of a sandbox, and the counter that numbers them.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::rand::{GetRandomFlags, getrandom};

/// Why a generation could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel gave no random bytes.
    #[error("cannot draw a generation's random numbers")]
    Random(#[source] io::Error),
    /// The counter file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// The counter file holds something else.
    #[error("{} holds {text:?} instead of a number: remove the sandbox", path.display())]
    Garbled {
        /// The file.
        path: PathBuf,
        /// What it holds.
        text: String,
    },
    /// The new number could not be made durable.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// 2^64 lives.
    #[error("the counter in {} is at its end: remove the sandbox", path.display())]
    Exhausted {
        /// The file.
        path: PathBuf,
    },
}

/// 128 random bits that only the monitor and its clients know. Never shown: no `Display`, and `Debug` leaves it
/// out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Nonce([u8; 16]);

impl Nonce {
    /// The bytes, for the fence and for clients.
    #[must_use]
    pub fn bytes(&self) -> [u8; 16] {
        self.0
    }

    /// 32 hex digits, for the files and lines that carry it.
    #[must_use]
    pub fn hex(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(..)")
    }
}

/// One guest timeline in one process.
///
/// Its `Display` form is the public part, `<counter>-<32 hex digits>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    counter: u64,
    public_id: u128,
    nonce: Nonce,
}

impl Generation {
    /// A new generation with this number, and fresh random parts.
    ///
    /// # Errors
    /// [`Error::Random`].
    pub fn new(counter: u64) -> Result<Self, Error> {
        let mut bytes = [0; 32];
        // Up to 256 bytes come whole once the kernel's pool is ready (getrandom(2)).
        getrandom(&mut bytes, GetRandomFlags::empty())
            .map_err(|source| Error::Random(source.into()))?;
        let (id, nonce) = bytes.split_at(16);
        let mut generation = Self {
            counter,
            public_id: 0,
            nonce: Nonce([0; 16]),
        };
        generation.nonce.0.copy_from_slice(nonce);
        generation.public_id = id
            .iter()
            .fold(0, |value, &byte| (value << 8) | u128::from(byte));
        Ok(generation)
    }

    /// Its number: one more than the life before.
    #[must_use]
    pub fn counter(&self) -> u64 {
        self.counter
    }

    /// Its random id, known to all.
    #[must_use]
    pub fn public_id(&self) -> u128 {
        self.public_id
    }

    /// Its secret.
    #[must_use]
    pub fn nonce(&self) -> Nonce {
        self.nonce
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:032x}", self.counter, self.public_id)
    }
}

/// The durable number of a sandbox's last life.
#[derive(Clone, Debug)]
pub struct Counter {
    folder: PathBuf,
}

const FILE: &str = "counter";

impl Counter {
    /// The counter of the sandbox in `folder`, which must exist by the first [`Counter::next`].
    #[must_use]
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// The number of the last life; 0 if there was none.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Garbled`].
    pub fn last(&self) -> Result<u64, Error> {
        let path = self.path();
        let mut text = String::new();
        match File::open(&path) {
            // One more digit than any number has.
            Ok(file) => file.take(22).read_to_string(&mut text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            Err(source) => return Err(Error::Read { path, source }),
        }
        .map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        match text.strip_suffix('\n').map(str::parse) {
            Some(Ok(counter)) => Ok(counter),
            _ => Err(Error::Garbled { path, text }),
        }
    }

    /// Takes the next number. When this returns, it is on disk and no later call will give it again.
    ///
    /// # Errors
    /// All of [`Error`] but `Random`; the number is then not taken.
    pub fn next(&self) -> Result<u64, Error> {
        let path = self.path();
        let next = self
            .last()?
            .checked_add(1)
            .ok_or_else(|| Error::Exhausted { path: path.clone() })?;
        self.replace(next)
            .map_err(|source| Error::Write { path, source })?;
        Ok(next)
    }

    fn path(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// Whole or not at all: a new file, synced, takes the old one's name, and then the name is synced.
    fn replace(&self, counter: u64) -> io::Result<()> {
        let new = self.folder.join("counter.new");
        let written = File::create(&new).and_then(|mut file| {
            writeln!(file, "{counter}")?;
            file.sync_all()
        });
        if let Err(error) = written.and_then(|()| fs::rename(&new, self.path())) {
            let _ = fs::remove_file(&new);
            return Err(error);
        }
        File::open(&self.folder)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_goes_up_by_one_and_survives() {
        let folder = tempfile::tempdir().unwrap();
        for expected in 1..=5 {
            assert_eq!(Counter::in_folder(folder.path()).next().unwrap(), expected);
        }
        let files: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(files.len(), 1);
    }

    #[test]
    fn garbled_counter_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        for text in [
            "",
            "\n",
            "7",
            "seven\n",
            "-1\n",
            "18446744073709551616\n",
            "1\n2\n",
        ] {
            fs::write(folder.path().join(FILE), text).unwrap();
            let error = Counter::in_folder(folder.path()).next().unwrap_err();
            assert!(matches!(error, Error::Garbled { .. }), "{text:?}: {error}");
            assert_eq!(fs::read_to_string(folder.path().join(FILE)).unwrap(), text);
        }
    }

    #[test]
    fn counter_at_its_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(FILE), format!("{}\n", u64::MAX)).unwrap();
        let error = Counter::in_folder(folder.path()).next().unwrap_err();
        assert!(matches!(error, Error::Exhausted { .. }));
    }

    #[test]
    fn missing_folder_is_a_write_error_that_names_the_file() {
        let error = Counter::in_folder(Path::new("/no/such/sandbox"))
            .next()
            .unwrap_err();
        assert!(error.to_string().contains("/no/such/sandbox/counter"));
    }

    #[test]
    fn generations_differ_and_show_their_public_part_only() {
        let (one, two) = (Generation::new(7).unwrap(), Generation::new(7).unwrap());
        assert_ne!(one.public_id(), two.public_id());
        assert_ne!(one.nonce(), two.nonce());
        assert_eq!(one.to_string(), format!("7-{:032x}", one.public_id()));
        let nonce = one.nonce().hex();
        assert_eq!(nonce.len(), 32);
        for shown in [
            format!("{one}"),
            format!("{one:?}"),
            format!("{:?}", one.nonce()),
        ] {
            assert!(!shown.contains(&nonce), "{shown}");
            assert!(
                !shown.contains(&format!("{:?}", one.nonce().bytes())),
                "{shown}"
            );
        }
    }
}
