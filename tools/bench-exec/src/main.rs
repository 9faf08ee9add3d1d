//! Both ends of `cargo xtask bench exec` and of `bench start`, which start it where the KVM is.
//!
//! ```text
//!   bench-exec measure PLAN   on the host: starts a sandbox, times execs in it, prints the samples as JSON
//!   bench-exec start PLAN     on the host: times fresh machines, ours and a peer's, to a workload's first byte
//!   bench-exec serve          in that sandbox, as an exec: what an exec's cost is compared with
//!                               port 7001  a byte for a byte
//!                               port 7002  for a byte, how long `true` took from fork (or vfork) to the end of wait
//! ```
//!
//! A static release build, so that the client library is measured as its users have it.

mod busy;
mod guest;
mod host;
mod sandbox;
mod start;

use std::error::Error;
use std::process::ExitCode;

/// Whatever went wrong, in words; the measurement ends with it.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["measure", plan] => host::measure(plan.as_ref()),
        ["start", plan] => start::measure(plan.as_ref()),
        ["serve"] => guest::serve(),
        _ => Err(
            "bench-exec is started by `cargo xtask bench`: measure PLAN, start PLAN, or serve"
                .into(),
        ),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-exec: {error}");
            ExitCode::FAILURE
        }
    }
}
