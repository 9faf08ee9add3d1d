//! The command line: what `vmm` is told, and the status that it leaves with.

mod doctor;
mod flags;
mod run;
mod signals;
mod status;
mod units;

use std::ffi::OsString;
use std::io::Write;

use clap::{Parser, Subcommand};

/// A KVM microVM monitor with an integrated guest agent.
#[derive(Debug, Parser)]
#[command(name = "vmm", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Boot a sandbox, run a command in it, and leave with the command's status
    Run(Box<run::Run>),
    /// Say what this host can do, and the command that mends what it cannot
    Doctor(doctor::Doctor),
}

/// Runs the command line and returns the process's exit status.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> u8 {
    let run = arguments
        .iter()
        .skip(1)
        .find(|word| !word.as_encoded_bytes().starts_with(b"-"));
    let usage = if run.is_some_and(|verb| verb == "run") {
        status::TOOL
    } else {
        status::USAGE
    };
    match Cli::try_parse_from(&arguments) {
        Ok(Cli {
            verb: Verb::Run(run),
        }) => run.main(),
        Ok(Cli {
            verb: Verb::Doctor(doctor),
        }) => doctor.main(),
        Err(error) if error.use_stderr() => {
            say(&error.render().to_string());
            usage
        }
        Err(help) => {
            // Asked for: data, so it goes to stdout.
            let _ = write!(std::io::stdout(), "{}", help.render());
            status::OK
        }
    }
}

/// A message for a person, on stderr; a stderr that is gone is no reason to fail.
fn say(message: &str) {
    let _ = writeln!(std::io::stderr(), "{}", message.trim_end());
}

/// An error with its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // Transparent wrappers repeat their cause.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line
}
