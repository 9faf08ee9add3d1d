//! The host-agent wire protocol: frames, state machines, limits.

pub mod cause;
pub mod control;
pub mod exec;
pub mod frame;
pub mod generation;
pub mod hello;
pub mod limits;
pub mod message;
pub mod session;
pub mod units;
mod wire;

pub use cause::{CancelReason, Cause, Counts, Oom, OomScope, Record, StartStage, Stream};
pub use frame::{Decoder, Frame, FrameError, HEADER_LEN, Header};
pub use generation::GenerationId;
pub use hello::{Hello, VERSIONS, Versions};
pub use limits::{AGENT_PORT, CONTROL_PORT};
pub use message::{
    AgentMessage, ClientMessage, ClosedWhy, ControlToAgent, ControlToHost, DownReason, ExecRequest,
    FrameKind, GoodbyeCode, InvalidRequest, Life, MessageError, OUTPUT_HEAD, Policy, ReadyStage,
    RefusedCode, TooLarge, User, Winsize, max_payload, output_head,
};
pub use wire::WireError;

/// Whether a test has taken the protection of this case away. Always false unless the crate is built with the
/// feature `negative-control`.
fn negative_control(case: &str) -> bool {
    cfg!(feature = "negative-control")
        && std::env::var_os("VMM_NEGATIVE_CONTROL").is_some_and(|value| value == case)
}
