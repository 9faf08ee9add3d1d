//! Generations of a sandbox, and later its snapshots.
//!
//! ```text
//!  counter file --next()--> 7 --Generation::new(7)--> { counter 7, public id, nonce }
//!  (durable before use)                                 known to all -----'     '---- monitor and clients only
//! ```
//!
//! A generation is one guest timeline in one process: new at every boot, restore and clone. Clients name the one
//! they mean, so that none ever reaches another.
//!
//! # Example
//!
//! ```
//! use vmm_snapshot::{Counter, Generation};
//!
//! let folder = tempfile::tempdir()?;
//! let counter = Counter::in_folder(folder.path());
//! let generation = Generation::new(counter.next()?)?;
//! assert_eq!(generation.counter(), 1);
//! assert_eq!(counter.next()?, 2);
//! // The nonce is in no debug text.
//! assert!(!format!("{generation:?}").contains(&generation.nonce().hex()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Limits
//!
//! A counter has one writer at a time: the holder of the sandbox's lock.
//!
//! # Modules and errors
//!
//! [`generation`]: the value, its text forms and the durable counter; [`generation::Error`].

pub mod generation;

pub use generation::{Counter, Generation, Nonce};
