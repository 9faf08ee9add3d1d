//! The control socket: JSON lines between a sandbox's process and the verbs that act on it.
//!
//! ```text
//!   vmm stop box --> Client --{"v":1,"op":"stop","grace_ms":10000}--> control.sock --> Server --> the supervisor
//!                           <-{"v":1,"ok":true}----------------------                    |
//!                           --{"v":1,"op":"wait"}------------------->                    |
//!                           <-{"v":1,"ok":true,"result":{...}}------- when it has ended -'
//! ```
//!
//! One request at a time per connection, answered in order. Requests are described in `docs/control-socket.md`. The
//! `message` module reads and writes them and does nothing else; `server` lives on the supervisor's loop, never
//! blocks it, and bounds everything a client can hold: lines, clients, time. The 0700 folder is the access control;
//! peers of another user are refused all the same.

mod client;
mod message;
mod server;

pub use client::{Client, Error as ClientError};
pub use message::{MAX_LINE, Refusal, Request, answer, parse, refuse};
pub use server::{Asked, Server, Token};
