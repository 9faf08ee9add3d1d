//! The host's session library: connect, hello, exec, attach. Blocking calls, no runtime.
//!
//! ```text
//!   Session::connect(path, tag)     Session::over(stream, generation)
//!        |  CONNECT 1000 7-<nonce>          |
//!        |  OK <host port> 7                |
//!        +---------------+------------------+
//!                        v  hello, generation compared
//!                     Session ---- exec(request) ----> Exec --> Started, Output..., Ended
//!                        |                              |  control() -> cancel, signal, resize
//!                        |  one thread: socket ->       |  stdin()   -> Write
//!                        |  protocol machine -> queues  |
//! ```
//!
//! ```no_run
//! use std::io::Write;
//! use vmm_client::{Deadlines, Event, GenerationTag, Session};
//! use vmm_protocol::{ExecRequest, GenerationId};
//!
//! let tag = GenerationTag::new(GenerationId { counter: 7, public_id: 0xabcd << 112 }, [0; 16]);
//! let path = "/run/vmm/box/g7-abcd0000/vsock.sock".as_ref();
//! let session = Session::connect(path, &tag, &Deadlines::default())?;
//!
//! for event in session.exec(&ExecRequest::new(["echo", "hello"]))? {
//!     match event {
//!         Event::Output { data, .. } => std::io::stdout().write_all(&data)?,
//!         Event::Ended(ended) => std::process::exit(ended.status().into()),
//!         _ => {}
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! An exec that should outlive its client is begun by [`Session::start`]; by its number, which that gives, it is attached
//! to, waited for, signalled, cancelled and released in any session of its generation, such as one of a [`Pool`].
//!
//! # Limits
//!
//! A session has at most [`MAX_EXECS`](vmm_protocol::limits::MAX_EXECS) execs at a time. What an
//! exec's handle has not taken is bounded by its window
//! ([`ExecRequest::window`](vmm_protocol::ExecRequest::window), 1 MiB by default) and a few hundred
//! notices; an exec that is not read holds up no other. Connecting, the answer to it and the hello
//! have deadlines ([`Deadlines`]). A session that ends, for whatever reason, ends all its execs at
//! once with [`Ended::Lost`], which says why and how much had been received.
//!
//! # Modules and errors
//!
//! Connecting fails with [`ConnectError`], whose variants tell a stale generation from a guest that
//! is not ready; requests of a session fail with [`SessionError`]. The protocol itself is in
//! [`vmm_protocol`].

mod bytes;
mod connect;
mod event;
mod exec;
mod io;
mod pool;
mod session;
mod tag;

pub use bytes::Bytes;
pub use connect::{ConnectError, Connection, Deadlines, open};
pub use event::{Ended, Event, Lost};
pub use exec::{Collected, Control, Exec, Stdin};
pub use pool::{Pool, PoolCounters};
pub use session::{Session, SessionError, StartError, Started};
pub use tag::GenerationTag;
