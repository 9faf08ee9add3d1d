//! What a client can ask to be run, and the check of it that both sides do.

use crate::limits::{
    MAX_EXEC_PAYLOAD, MAX_GROUPS, MAX_OUTPUT_LIMIT, MAX_STRING, MAX_STRINGS, MAX_TIMEOUT_NS,
    MAX_WINDOW,
};
use crate::wire::{Reader, WireError, Writer};

use super::RefusedCode;

/// The bit of an exec request's flags for one that outlives its client.
const DETACHED: u8 = 1;

/// A command to run.
///
/// ```
/// use vmm_protocol::{ExecRequest, InvalidRequest};
///
/// let mut request = ExecRequest::new(["sh", "-c", "echo hello"]);
/// request.timeout_ns = 10_000_000_000;
/// assert_eq!(request.validate(), Ok(()));
///
/// request.argv[0] = b"a\0b".to_vec();
/// assert_eq!(request.validate(), Err(InvalidRequest::Nul { field: "argv" }));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecRequest {
    /// Program and arguments; the program is looked up in the exec's own `PATH` unless it has a
    /// slash.
    pub argv: Vec<Vec<u8>>,
    /// `NAME=VALUE` entries, laid over the agent's small default environment; of two with one name
    /// the later one holds.
    pub env: Vec<Vec<u8>>,
    /// Working directory; empty for `/`.
    pub cwd: Vec<u8>,
    /// User and groups; none for root.
    pub user: Option<User>,
    /// A terminal of this size for all three streams, instead of pipes.
    pub tty: Option<Winsize>,
    /// The client sends stdin; otherwise the workload sees its end at once.
    pub stdin: bool,
    /// What happens at the output limit.
    pub policy: Policy,
    /// Time that it may run, in nanoseconds; 0 for no end.
    pub timeout_ns: u64,
    /// The cap on both streams together, in bytes; none for no cap.
    pub output_limit: Option<u64>,
    /// Output bytes that may be on their way to the client at a time.
    pub window: u64,
    /// It outlives its client, and is kept with its output until it is released. The request is over once it has
    /// started: its output is had by attaching.
    pub detached: bool,
}

impl ExecRequest {
    /// A request with every default.
    pub fn new<A: Into<Vec<u8>>>(argv: impl IntoIterator<Item = A>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            cwd: Vec::new(),
            user: None,
            tty: None,
            stdin: false,
            policy: Policy::Kill,
            timeout_ns: 0,
            output_limit: Some(crate::limits::DEFAULT_OUTPUT_LIMIT),
            window: crate::limits::DEFAULT_WINDOW,
            detached: false,
        }
    }

    /// Checks everything that is wrong whatever the guest is like. A client does it before it
    /// sends, an agent before it acts.
    pub fn validate(&self) -> Result<(), InvalidRequest> {
        if self.argv.is_empty() || self.argv[0].is_empty() {
            return Err(InvalidRequest::NoProgram);
        }
        let nul = |bytes: &Vec<u8>| bytes.contains(&0);
        if self.argv.iter().any(nul) {
            return Err(InvalidRequest::Nul { field: "argv" });
        }
        if self.env.iter().any(nul) {
            return Err(InvalidRequest::Nul { field: "env" });
        }
        if nul(&self.cwd) {
            return Err(InvalidRequest::Nul { field: "cwd" });
        }
        if let Some(entry) = self.env.iter().find(|entry| {
            entry
                .iter()
                .position(|byte| *byte == b'=')
                .is_none_or(|at| at == 0)
        }) {
            return Err(InvalidRequest::Env {
                entry: String::from_utf8_lossy(entry).into_owned(),
            });
        }
        for (what, list) in [("argv", &self.argv), ("env", &self.env)] {
            if list.len() > MAX_STRINGS {
                return Err(InvalidRequest::TooMany {
                    field: what,
                    count: list.len(),
                    limit: MAX_STRINGS,
                });
            }
        }
        for (field, list) in [("argv", &self.argv), ("env", &self.env)] {
            if let Some(string) = list.iter().find(|string| string.len() > MAX_STRING) {
                return Err(InvalidRequest::TooLong {
                    field,
                    length: string.len(),
                    limit: MAX_STRING,
                });
            }
        }
        if self.detached && self.stdin {
            return Err(InvalidRequest::DetachedStdin);
        }
        if let Some(groups) = self
            .user
            .as_ref()
            .map(|user| user.groups.len())
            .filter(|groups| *groups > MAX_GROUPS)
        {
            return Err(InvalidRequest::TooMany {
                field: "groups",
                count: groups,
                limit: MAX_GROUPS,
            });
        }
        if self
            .tty
            .is_some_and(|size| size.rows == 0 || size.columns == 0)
        {
            return Err(InvalidRequest::Winsize);
        }
        if self.timeout_ns > MAX_TIMEOUT_NS {
            return Err(InvalidRequest::Timeout {
                nanoseconds: self.timeout_ns,
            });
        }
        if let Some(limit) = self
            .output_limit
            .filter(|limit| *limit == 0 || *limit > MAX_OUTPUT_LIMIT)
        {
            return Err(InvalidRequest::OutputLimit { limit });
        }
        if self.window == 0 || self.window > MAX_WINDOW {
            return Err(InvalidRequest::Window {
                window: self.window,
            });
        }
        let mut payload = Vec::new();
        self.write(&mut Writer::new(&mut payload));
        if payload.len() > MAX_EXEC_PAYLOAD {
            return Err(InvalidRequest::TooLarge {
                length: payload.len(),
                limit: MAX_EXEC_PAYLOAD,
            });
        }
        Ok(())
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        writer.list(&self.argv).list(&self.env).bytes(&self.cwd);
        writer.bool(self.user.is_some());
        if let Some(user) = &self.user {
            writer
                .u32(user.uid)
                .u32(user.gid)
                .u32(user.groups.len() as u32);
            for group in &user.groups {
                writer.u32(*group);
            }
        }
        writer.bool(self.tty.is_some());
        if let Some(size) = self.tty {
            writer.u16(size.rows).u16(size.columns);
        }
        writer
            .bool(self.stdin)
            .u8(self.policy as u8)
            .u8(if self.detached { DETACHED } else { 0 })
            .u64(self.timeout_ns);
        writer
            .bool(self.output_limit.is_some())
            .u64(self.output_limit.unwrap_or(0))
            .u64(self.window);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let argv = reader.list(MAX_EXEC_PAYLOAD, "argv")?;
        let env = reader.list(MAX_EXEC_PAYLOAD, "env")?;
        let cwd = reader.bytes(MAX_EXEC_PAYLOAD, "cwd")?.to_vec();
        let user = match reader.bool("user flag")? {
            true => Some(User::read(reader)?),
            false => None,
        };
        let tty = match reader.bool("tty flag")? {
            true => Some(Winsize {
                rows: reader.u16("rows")?,
                columns: reader.u16("columns")?,
            }),
            false => None,
        };
        let stdin = reader.bool("stdin flag")?;
        let policy = Policy::from_wire(reader.u8("policy")?)?;
        let detached = reader.flags(DETACHED, "exec flags")? & DETACHED != 0;
        let timeout_ns = reader.u64("timeout")?;
        let capped = reader.bool("output limit flag")?;
        let limit = reader.u64("output limit")?;
        if !capped && limit != 0 {
            return Err(WireError::Value {
                field: "output limit",
                value: limit,
            });
        }
        let window = reader.u64("window")?;
        let output_limit = capped.then_some(limit);
        Ok(Self {
            argv,
            env,
            cwd,
            user,
            tty,
            stdin,
            policy,
            timeout_ns,
            output_limit,
            window,
            detached,
        })
    }
}

/// Who runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary groups, and no others.
    pub groups: Vec<u32>,
}

impl User {
    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let (uid, gid) = (reader.u32("uid")?, reader.u32("gid")?);
        let count = reader.count(4, "groups")?;
        if count > MAX_GROUPS {
            return Err(WireError::Long {
                field: "groups",
                length: count as u64,
                limit: MAX_GROUPS as u64,
            });
        }
        let groups = (0..count)
            .map(|_| reader.u32("groups"))
            .collect::<Result<_, _>>()?;
        Ok(Self { uid, gid, groups })
    }
}

/// A terminal's size in characters; neither is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Winsize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

crate::cause::wire_enum! {
    /// What happens to an exec that writes more than its cap.
    Policy, "policy",
    /// Its whole leaf is killed.
    Kill = 1 => "kill",
    /// It runs on, and what it writes is counted and thrown away.
    Drain = 2 => "drain",
}

/// What is wrong with a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequest {
    /// No program is named.
    #[error("no program is named")]
    NoProgram,
    /// A zero byte, which the kernel cannot take.
    #[error("{field} holds a zero byte")]
    Nul {
        /// Where.
        field: &'static str,
    },
    /// An environment entry without a name.
    #[error("environment entry {entry:?} is not NAME=VALUE")]
    Env {
        /// The entry.
        entry: String,
    },
    /// A list has too many elements.
    #[error("{field} has {count} elements, at most {limit} are allowed")]
    TooMany {
        /// The list.
        field: &'static str,
        /// Its length.
        count: usize,
        /// Its limit.
        limit: usize,
    },
    /// A terminal without rows or columns.
    #[error("a terminal has at least one row and one column")]
    Winsize,
    /// A timeout beyond every sensible one.
    #[error("timeout of {nanoseconds} ns is out of range")]
    Timeout {
        /// The timeout.
        nanoseconds: u64,
    },
    /// An output limit of nothing, or beyond every sensible one.
    #[error("output limit of {limit} bytes is out of range")]
    OutputLimit {
        /// The limit.
        limit: u64,
    },
    /// An output window of nothing, or beyond its limit.
    #[error("output window of {window} bytes is out of range")]
    Window {
        /// The window.
        window: u64,
    },
    /// A string is longer than the kernel takes one.
    #[error("a string of {field} has {length} bytes, at most {limit} are allowed")]
    TooLong {
        /// The list.
        field: &'static str,
        /// Its length.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// Nobody would be left to send it.
    #[error("a detached exec has no stdin")]
    DetachedStdin,
    /// Arguments and environment together are too large.
    #[error("the request has {length} bytes, at most {limit} are allowed")]
    TooLarge {
        /// Its length.
        length: usize,
        /// The limit.
        limit: usize,
    },
}

impl InvalidRequest {
    /// How an agent says it.
    pub(crate) fn code(&self) -> RefusedCode {
        match self {
            Self::TooMany { .. } | Self::TooLong { .. } | Self::TooLarge { .. } => {
                RefusedCode::TooLarge
            }
            _ => RefusedCode::Invalid,
        }
    }
}
