//! The project's own tools: setup, image, kernel, nest, test, bench.

mod apt;
mod bzimage;
mod cpio;
mod error;
mod kernel;
mod modules;
mod nest;
mod place;
mod process;
mod say;
mod setup;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::error::Result;
use crate::place::Place;

/// The project's own tools.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a command in the nest: a software-emulated machine with a real kvm_amd.
    ///
    /// The host's root is there read-only, with writable layers over /tmp, /run and /var/tmp that vanish; the working
    /// directory and the environment are the same. What is written to $VMM_OUT comes back. Leaves with the command's
    /// status; 124 when --timeout passed, 123 when the nest wedged twice, 125 when it could not be started.
    Nest(NestArguments),
}

#[derive(clap::Args)]
struct NestArguments {
    /// The longest time, boot included, such as 90s or 10m.
    #[arg(long, value_parser = duration)]
    timeout: Option<Duration>,
    /// The writable folder that comes back [default: target/nest-out].
    #[arg(long)]
    out: Option<PathBuf>,
    /// The nest's memory in MiB.
    #[arg(long, default_value_t = 6144, value_parser = clap::value_parser!(u64).range(512..=65536))]
    memory: u64,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 125 } else { 0 });
        }
    };
    match dispatch(cli.verb) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            say::step(format!("error: {error}"));
            ExitCode::from(error.status())
        }
    }
}

fn dispatch(verb: Verb) -> Result<u8> {
    let place = Place::find();
    match verb {
        Verb::Nest(arguments) => {
            let mut options = nest::Options::new(&place, arguments.command);
            options.timeout = arguments.timeout;
            options.memory = arguments.memory;
            options.out = arguments.out.unwrap_or(options.out);
            nest::run(&place, &options, nest::own_sinks()?)
        }
    }
}

/// A time with its unit; a bare number is seconds.
fn duration(text: &str) -> std::result::Result<Duration, String> {
    let at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: u64 = text[..at]
        .parse()
        .map_err(|_| "expected a number with s, m or h".to_owned())?;
    let unit = match &text[at..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        unit => return Err(format!("unknown unit {unit:?}: use s, m or h")),
    };
    number
        .checked_mul(unit)
        .filter(|seconds| (1..=7 * 24 * 3600).contains(seconds))
        .map(Duration::from_secs)
        .ok_or_else(|| "expected a time from 1s to 7 days".into())
}
