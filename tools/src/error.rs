//! What the tools can fail with, and the status that each leaves with.

use std::io;
use std::path::PathBuf;

/// A failure of a tool.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation of the operating system.
    #[error("{what}: {source}")]
    Io {
        /// The operation and what it was done to.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// Another program left with a status other than 0.
    #[error("`{command}` failed ({status}){output}")]
    Command {
        /// Its command line.
        command: String,
        /// How it ended.
        status: String,
        /// What it said, where that was not shown already; begins with a line break.
        output: String,
    },
    /// Something that setup would bring is not there and cannot be brought.
    #[error("{what} is missing: {remedy}")]
    Missing {
        /// What is missing.
        what: String,
        /// The command that mends it.
        remedy: String,
    },
    /// A file is not what it should be.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// An argument or a configuration that cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// A check of `test` or `cases` did not hold.
    #[error("{0}")]
    Check(String),
    /// The nest ran past its time limit.
    #[error("the nest ran longer than {0} s and was ended")]
    TimedOut(u64),
    /// The nest wedged or died, and again when it was started once more.
    #[error("the nest {0}")]
    Nest(String),
}

/// Shorthand of the tools.
pub type Result<T> = std::result::Result<T, Error>;

/// The status of a nest that wedged or died twice; no program in it chose this one.
pub const NEST_STATUS: u8 = 123;

impl Error {
    /// The exit status of the class of this failure.
    pub fn status(&self) -> u8 {
        match self {
            Self::Check(_) => 1,
            Self::TimedOut(_) => 124,
            Self::Nest(_) => NEST_STATUS,
            Self::Io { .. }
            | Self::Command { .. }
            | Self::Missing { .. }
            | Self::Malformed { .. }
            | Self::Invalid(_) => 125,
        }
    }

    /// A malformed file.
    pub fn malformed(path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self::Malformed {
            path: path.into(),
            what: what.into(),
        }
    }
}

/// Names the operation that an error came from.
pub trait Naming<T> {
    /// The same result, its error with the operation's name.
    fn naming(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Naming<T> for std::result::Result<T, E> {
    fn naming(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io {
            what: what(),
            source: source.into(),
        })
    }
}
