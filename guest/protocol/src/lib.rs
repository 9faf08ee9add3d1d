//! The host-agent wire protocol: frames, state machines, limits. No I/O, no clock, no unsafe.
//!
//! ```text
//!       host                                         guest
//!   client ── ClientSession ══ session frames ══ AgentSession ── agent
//!               │ requests                         │ requests        ┌── Exec: cap, store, kills, record
//!               └ events                           └ fill ◄──────────┴── Exec ◄── pipes, exits, deadlines
//!   monitor ── HostControl ══ control frames ══ AgentControl ── agent
//! ```
//!
//! Every machine here is plain state. Its driver owns the descriptors and the clock: it moves bytes
//! between a socket and the machine, tells it the time where it asks for it, and acts on what comes
//! out. So the very same code is driven by the agent's loop, the client library, the monitor, unit
//! tests and property tests.
//!
//! A client and an agent, and all that they say to each other for one exec:
//!
//! ```
//! use std::collections::BTreeMap;
//! use vmm_protocol::exec::{Action, Exec, MainEnd, Settings, Usage};
//! use vmm_protocol::session::{AgentSession, ClientSession, Event, Request};
//! use vmm_protocol::{ExecRequest, GenerationId, Hello, Stream};
//!
//! let hello = Hello::new(GenerationId { counter: 1, public_id: 2 });
//! let mut client = ClientSession::new(hello, 0);
//! let mut agent = AgentSession::new(hello, 0);
//! client.exec(&ExecRequest::new(["echo", "hi"]))?;
//!
//! // To the agent, whose workload writes three bytes and exits.
//! let bytes = client.outgoing().to_vec();
//! agent.space()[..bytes.len()].copy_from_slice(&bytes);
//! agent.filled(bytes.len(), 0);
//! let mut execs = BTreeMap::new();
//! while let Some(request) = agent.next()? {
//!     if let Request::Exec { id, request } = request {
//!         let mut exec = Exec::new(Settings::new(&request), 0);
//!         exec.started(1, 100);
//!         exec.absorb(Stream::Stdout, b"hi\n", 0);
//!         exec.main_exited(MainEnd::Exited(0), 0);
//!         exec.leaf_empty();
//!         exec.close(Stream::Stdout);
//!         exec.close(Stream::Stderr);
//!         while let Some(action) = exec.action() {
//!             if action == Action::Finish {
//!                 exec.finish(Usage::default(), 0);
//!             }
//!         }
//!         execs.insert(id, exec);
//!     }
//! }
//!
//! // And back.
//! agent.fill(&execs);
//! for slice in agent.gather(&execs)? {
//!     client.space()[..slice.len()].copy_from_slice(&slice);
//!     client.filled(slice.len(), 0);
//! }
//! let mut said = Vec::new();
//! while let Some(event) = client.next()? {
//!     match event {
//!         Event::Output { data, .. } => said.extend_from_slice(data),
//!         Event::Exit { record, .. } => assert_eq!(record.status(), 0),
//!         _ => {}
//!     }
//! }
//! assert_eq!(said, b"hi\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Limits
//!
//! All numbers are in [`limits`]. Memory of a connection is bounded by one frame coming in, by what
//! its side leaves unread going out, and by the execs' own stores
//! ([`exec::Settings::store_bytes`]).
//!
//! # Modules
//!
//! - [`frame`], [`message`], [`hello`], [`generation`], [`cause`]: what travels, as types and as
//!   bytes
//! - [`session`], [`control`]: the machines of both ends of both kinds of connection
//! - [`exec`]: one exec inside the agent
//! - [`limits`], [`units`]: the numbers, and the sizes and times that people write
//!
//! The written specification, for those who do not use this crate, is `PROTOCOL.md` beside it, with
//! golden vectors in `golden/`; the tests hold all three together.
//!
//! # Errors
//!
//! [`FrameError`], [`MessageError`] and [`WireError`] say what is wrong with bytes,
//! [`session::Violation`] why a connection ends for it, [`session::RequestError`],
//! [`InvalidRequest`] and [`units::UnitError`] what is wrong with a wish before anything is sent.

pub mod cause;
pub mod control;
pub mod exec;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
#[allow(clippy::panic)] // What it is for.
pub mod fuzzing;
pub mod generation;
pub mod hello;
pub mod limits;
pub mod message;
pub mod session;
pub mod units;
mod wire;

pub use cause::{
    CancelReason, Cause, CauseKind, Counts, Oom, OomScope, Record, StartStage, Stream,
};
pub use frame::{Decoder, Frame, FrameError, HEADER_LEN, Header};
pub use generation::GenerationId;
pub use hello::{Hello, VERSIONS, Versions};
pub use limits::{AGENT_PORT, CONTROL_PORT};
pub use message::{
    AgentCounters, AgentMessage, ClientMessage, ClosedWhy, ControlToAgent, ControlToHost,
    DownReason, ExecInfo, ExecRequest, ExecState, ExecsPage, FrameKind, GoodbyeCode,
    InvalidRequest, Life, MessageError, OUTPUT_HEAD, Policy, ReadyStage, Refusal, RefusedCode,
    TooLarge, User, Winsize, max_payload, output_head,
};
pub use wire::WireError;

/// Whether a test has taken the protection of this case away. Always false unless the crate is
/// built with the feature `negative-control`.
fn negative_control(case: &str) -> bool {
    cfg!(feature = "negative-control")
        && std::env::var_os("VMM_NEGATIVE_CONTROL").is_some_and(|value| value == case)
}

/// So many random cases of a property. A failure is kept as a named test, not as a file of seeds.
#[cfg(test)]
fn cases(cases: u32) -> proptest::test_runner::Config {
    proptest::test_runner::Config {
        cases,
        failure_persistence: None,
        ..Default::default()
    }
}
