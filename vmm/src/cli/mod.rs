//! The command line: what `vmm` is told, and the status that it leaves with.

#[macro_use]
mod lazy;

mod attach;
mod background;
mod doctor;
pub(crate) mod ending;
mod errors;
mod exec;
mod flags;
pub(crate) mod inherited;
mod input;
pub(crate) mod interactive;
pub(crate) mod output;
mod plan;
mod run;
pub(crate) mod signals;
mod start;
pub(crate) mod status;
mod status_file;
pub(crate) mod stream;
mod terminal;
mod units;
mod verbs;

use std::ffi::OsString;
use std::io::Write;

use clap::Parser;

/// A KVM microVM monitor with an integrated guest agent.
#[derive(Debug, Parser)]
#[command(name = "vmm", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

verbs! {
    /// Boot a sandbox, run a command in it, and leave with the command's status
    "run" Run(Box<run::Run>)
    /// Boot a sandbox that stays
    "start" Start(Box<start::Start>)
    /// Run a command in a sandbox
    "exec" Exec(Box<exec::Exec>)
    /// Print an exec's output from an offset on, and leave with its status
    "attach" Attach(Box<attach::Attach>)
    /// List sandboxes, or one with its execs
    "ps" Ps(verbs::Ps)
    /// Print all that is known of a sandbox
    "inspect" Inspect(verbs::Inspect)
    /// Print what a sandbox wrote
    "logs" Logs(verbs::Logs)
    /// Print a sandbox's counters
    "metrics" Metrics(verbs::Metrics)
    /// Wait for the end of a sandbox, or of an exec in it, and print its status
    "wait" Wait(verbs::Wait)
    /// Forget a detached exec that has ended, with its output
    "release" Release(verbs::Release)
    /// End an exec gracefully, then at once
    "cancel" Cancel(verbs::Cancel)
    /// End a sandbox gracefully, then at once
    "stop" Stop(verbs::Stop)
    /// End a sandbox at once, or send a signal to an exec in it
    "kill" Kill(verbs::Kill)
    /// Remove a sandbox that does not run, with its logs and records
    "rm" Rm(verbs::Rm)
    /// Say what this host can do, and the command that mends what it cannot
    "doctor" Doctor(doctor::Doctor)
    /// Print a completion script for a shell
    "completion" Completion(verbs::Completion)
}

fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Runs the command line and returns the process's exit status.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> u8 {
    let verb = arguments
        .iter()
        .skip(1)
        .find(|word| !word.as_encoded_bytes().starts_with(b"-"));
    let usage = if verb.is_some_and(|verb| verb == "run" || verb == "exec" || verb == "attach") {
        status::TOOL
    } else {
        status::USAGE
    };
    let verb = match Cli::try_parse_from(&arguments) {
        Ok(Cli { verb }) => verb,
        Err(error) if error.use_stderr() => {
            say(&error.render().to_string());
            return usage;
        }
        Err(help) => {
            // Asked for: data, so it goes to stdout.
            let _ = write!(std::io::stdout(), "{}", help.render());
            return status::OK;
        }
    };
    match verb {
        Verb::Run(run) => run.main(),
        Verb::Start(start) => start.main(),
        Verb::Exec(exec) => exec.main(),
        Verb::Attach(attach) => attach.main(),
        Verb::Ps(ps) => verbs::leave(ps.main()),
        Verb::Inspect(inspect) => verbs::leave(inspect.main()),
        Verb::Logs(logs) => verbs::leave(logs.main()),
        Verb::Metrics(metrics) => verbs::leave(metrics.main()),
        Verb::Wait(wait) => verbs::leave(wait.main()),
        Verb::Release(release) => verbs::leave(release.main()),
        Verb::Cancel(cancel) => verbs::leave(cancel.main()),
        Verb::Stop(stop) => verbs::leave(stop.main()),
        Verb::Kill(kill) => verbs::leave(kill.main()),
        Verb::Rm(rm) => verbs::leave(rm.main()),
        Verb::Doctor(doctor) => doctor.main(),
        Verb::Completion(completion) => verbs::leave(completion.main()),
    }
}

/// A message for a person, on stderr; a stderr that is gone is no reason to fail.
pub(crate) fn say(message: &str) {
    // One write, so that lines of several processes stay whole.
    let line = format!("{}\n", message.trim_end());
    let _ = errors::Errors.write_all(line.as_bytes());
}

/// An error with its causes, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
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
