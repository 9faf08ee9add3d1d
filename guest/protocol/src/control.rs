//! The control connection: the state machines of the agent, which dials, and of the host, which
//! answers.
//!
//! ```text
//!   agent                                   host
//!     | ---- hello ------------------------> |    due within 5 s
//!     | <--- life (generation, time, ...) -- |    due within 5 s
//!     |      applies all of it               |
//!     | ---- ready or failed --------------> |
//!     | ---- confirm ----------------------> |    any time after: is it still the same life?
//!     | <--- confirmed --------------------- |
//!     | <--- ping, power off --------------- |
//!     | ---- pong, down -------------------> |
//!     | <--- ask counters ------------------ |    once ready, one at a time
//!     | ---- counters ---------------------> |    with the question's number
//! ```
//!
//! The host trusts nothing that is said here: what it hears can only make it think worse of its own
//! guest.

mod agent;
mod host;

pub use agent::{AgentControl, ControlEvent};
pub use host::{HostControl, HostEvent};

#[cfg(test)]
mod tests;
