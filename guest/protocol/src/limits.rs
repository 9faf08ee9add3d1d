//! Every number that bounds something on the wire, and the parsing of sizes and times that people
//! write.

/// The vsock port on which the agent listens for sessions.
pub const AGENT_PORT: u32 = 1000;
/// The host port (on CID 2) that the agent dials when it is up.
pub const CONTROL_PORT: u32 = 1001;
/// The largest payload of every kind but exec.
pub const MAX_PAYLOAD: usize = 64 << 10;
/// The largest payload of an exec request: a script of the kernel's longest argument (128 KiB)
/// fits.
pub const MAX_EXEC_PAYLOAD: usize = 256 << 10;
/// The most data in one output or stdin frame; the whole frame then fits one 64 KiB vsock packet.
pub const MAX_DATA: usize = MAX_PAYLOAD - 128;
/// The most strings in one list of a request.
pub const MAX_STRINGS: usize = 16 << 10;
/// The longest message, name or reason in bytes.
pub const MAX_TEXT: usize = 1024;
/// The longest string of a request's arguments or environment: the kernel's `MAX_ARG_STRLEN` less the zero byte behind
/// it.
pub const MAX_STRING: usize = (128 << 10) - 1;
/// The most numbers of a refusal.
pub const MAX_NUMBERS: usize = 64;
/// The most execs in one part of a list.
pub const MAX_LISTED: usize = 256;
/// The longest command in a list, in bytes.
pub const MAX_COMMAND: usize = 128;
/// The most supplementary groups of a user.
pub const MAX_GROUPS: usize = 1024;
/// The most execs that one session may have at a time.
pub const MAX_EXECS: usize = 1024;
/// The largest output window of an exec in bytes.
pub const MAX_WINDOW: u64 = 16 << 20;
/// Stdin bytes that a client may send before the agent has granted any.
pub const STDIN_WINDOW: u64 = 64 << 10;
/// How long a hello, or the rest of a frame that has begun, may take.
pub const HELLO_DEADLINE_NS: u64 = 5_000_000_000;
/// The cap on output when none is asked for.
pub const DEFAULT_OUTPUT_LIMIT: u64 = 1 << 20;
/// The ring that an uncapped exec keeps.
pub const UNCAPPED_RING: usize = 1 << 20;
/// The output window of an exec when a client does not choose one.
pub const DEFAULT_WINDOW: u64 = 1 << 20;
/// The longest timeout: a year of 366 days.
pub const MAX_TIMEOUT_NS: u64 = 366 * 24 * 3600 * 1_000_000_000;
/// The largest output limit: an agent keeps all of it until the exec is released.
pub const MAX_OUTPUT_LIMIT: u64 = 1 << 30;
