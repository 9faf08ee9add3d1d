//! One sandbox under soak, by the `vmm` program, and what must be true of everything it does.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::error::{Error, Naming, Result};
use crate::process::line;

/// A number of lines that no exec here ever writes whole.
pub const ENDLESS: &str = "1000000000";
/// Lists what is left of execs, and of their processes, in the guest.
const LEAVES: &str = "find /sys/fs/cgroup -type d -name 'exec-*' | wc -l";

/// What is compared at the end of a life with its beginning.
#[derive(Debug, PartialEq, Eq)]
pub struct Baseline {
    descriptors: usize,
    threads: usize,
    connections: u64,
    leaves: u64,
    /// That the agent keeps for later clients.
    execs: usize,
}

pub struct Sandbox {
    vmm: PathBuf,
    root: PathBuf,
    name: String,
}

impl Sandbox {
    pub fn new(vmm: &Path, root: &Path, name: &str) -> Self {
        Self {
            vmm: vmm.to_owned(),
            root: root.to_owned(),
            name: name.to_owned(),
        }
    }

    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.vmm);
        command
            .args([verb, &self.name, "--dir"])
            .arg(&self.root)
            .stdin(Stdio::null());
        command
    }

    pub fn exec(&self, flags: &[&str], script: &str) -> Command {
        let mut command = self.command("exec");
        command.args(flags).args(["--", "sh", "-c", script]);
        command
    }

    fn verb(&self, verb: &str, flags: &[&str]) -> Result<Output> {
        let mut command = self.command(verb);
        ended(command.args(flags), 0)
    }

    pub fn start(&self) -> Result<()> {
        self.verb("start", &["-d", "--ready-timeout", "240s"])
            .map(drop)
    }

    pub fn stop(&self) -> Result<()> {
        self.verb("stop", &["--time", "60s"])?;
        self.is("ended")
    }

    pub fn kill(&self) -> Result<()> {
        self.verb("kill", &[])?;
        self.is("ended")
    }

    pub fn remove(&self) -> Result<()> {
        self.verb("rm", &["-f"]).map(drop)
    }

    pub fn row(&self, verb: &str) -> Result<Value> {
        let output = self.verb(verb, &["--json"])?;
        serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::Check(format!("{verb} --json of {}: {error}", self.name)))
    }

    fn is(&self, state: &str) -> Result<()> {
        let row = self.row("ps")?;
        check(row["state"] == state, || format!("not {state}: {row}"))
    }

    /// Output below the cap arrives whole.
    pub fn whole(&self, lines: u64) -> Result<()> {
        let output = ended(&mut self.exec(&[], &format!("seq 1 {lines}; exit 9")), 9)?;
        check(output.stdout == sequence(usize::MAX, lines), || {
            format!("{} bytes of seq 1 {lines} are wrong", output.stdout.len())
        })
    }

    /// Output above the cap is exactly the cap.
    pub fn limited(&self, cap: u64) -> Result<()> {
        let flags = ["--output-limit", &cap.to_string()];
        let output = ended(&mut self.exec(&flags, &format!("seq 1 {ENDLESS}")), 125)?;
        let expected = sequence(cap as usize, u64::MAX);
        check(output.stdout == expected, || {
            format!(
                "{} bytes came for a limit of {cap}, or wrong ones",
                output.stdout.len()
            )
        })
    }

    pub fn timed_out(&self) -> Result<()> {
        let script = "setsid sleep 1000 & printf up; sleep 1000";
        let output = ended(&mut self.exec(&["--timeout", "500ms"], script), 124)?;
        check(b"up".starts_with(&output.stdout), || format!("{output:?}"))
    }

    /// Ctrl-C after some bytes.
    pub fn cancelled(&self, after: u64) -> Result<()> {
        let (mut child, mut got) = self.endless(after)?;
        kill_process(Pid::from_child(&child), Signal::INT)
            .naming(|| "interrupt vmm exec".into())?;
        if let Some(stdout) = &mut child.stdout {
            stdout
                .read_to_end(&mut got)
                .naming(|| "read the output".into())?;
        }
        let status = child.wait().naming(|| "wait for vmm exec".into())?;
        check(status.code() == Some(130), || {
            format!("left with {status} after SIGINT")
        })?;
        prefix(&got)
    }

    /// A client that is gone without a word.
    pub fn client_killed(&self, after: u64) -> Result<()> {
        let (mut child, mut got) = self.endless(after)?;
        child.kill().naming(|| "kill vmm exec".into())?;
        if let Some(stdout) = &mut child.stdout {
            stdout
                .read_to_end(&mut got)
                .naming(|| "read the output".into())?;
        }
        child.wait().naming(|| "wait for vmm exec".into())?;
        prefix(&got)
    }

    /// An exec that never ends by itself, of which some bytes have come.
    fn endless(&self, after: u64) -> Result<(Child, Vec<u8>)> {
        let mut command = self.exec(&["--output-limit", "none"], &format!("seq 1 {ENDLESS}"));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command
            .spawn()
            .naming(|| format!("start `{}`", line(&command)))?;
        let mut got = vec![0; after as usize + 1];
        if let Some(stdout) = &mut child.stdout {
            stdout
                .read_exact(&mut got)
                .naming(|| "read the output".into())?;
        }
        Ok((child, got))
    }

    /// Several at once, each with its own output and status.
    pub fn many(&self, count: u64) -> Result<()> {
        let children: Vec<Child> = (0..count)
            .map(|number| {
                let script = format!("seq 1 {}; exit {number}", number * 1000);
                let mut command = self.exec(&[], &script);
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
                command
                    .spawn()
                    .naming(|| format!("start `{}`", line(&command)))
            })
            .collect::<Result<_>>()?;
        for (number, child) in (0..).zip(children) {
            let output = child
                .wait_with_output()
                .naming(|| "wait for vmm exec".into())?;
            let right = output.stdout == sequence(usize::MAX, number * 1000);
            check(right && output.status.code() == Some(number as i32), || {
                format!(
                    "exec {number} of {count}: {}, {} bytes, {}",
                    output.status,
                    output.stdout.len(),
                    String::from_utf8_lossy(&output.stderr)
                )
            })?;
        }
        Ok(())
    }

    /// What is counted of it now.
    pub fn baseline(&self) -> Result<Baseline> {
        // One exec first: what the first use sets up stays. It also comes behind all that clients left behind.
        let leaves = ended(&mut self.exec(&[], LEAVES), 0)?;
        let leaves = String::from_utf8_lossy(&leaves.stdout).trim().parse();
        let pid = self.row("ps")?["pid"].as_u64().unwrap_or(0);
        let entries = |what: &str| -> Result<usize> {
            let folder = format!("/proc/{pid}/{what}");
            Ok(std::fs::read_dir(&folder)
                .naming(|| format!("list {folder}"))?
                .count())
        };
        let metrics = self.quiet()?;
        check(metrics["devices"]["without_progress"] == 0, || {
            format!("wake-ups without progress: {metrics}")
        })?;
        Ok(Baseline {
            descriptors: entries("fd")?,
            threads: entries("task")?,
            connections: metrics["vsock"]["connections"].as_u64().unwrap_or(u64::MAX),
            execs: self.execs()?,
            leaves: leaves.map_err(|error| Error::Check(format!("counting leaves: {error}")))?,
        })
    }

    /// Its counters once the agent's own connection is the only one, or after fifty looks: the guest's part in closing
    /// the last client's takes its time.
    fn quiet(&self) -> Result<Value> {
        let mut metrics = self.row("metrics")?;
        for _ in 0..50 {
            if metrics["vsock"]["connections"] == 1 {
                break;
            }
            metrics = self.row("metrics")?;
        }
        Ok(metrics)
    }

    /// Back at its baseline. A client that was killed is noticed when its socket closes, its exec is gone a little
    /// later: each look is an exec of its own, which waits for what is before it, and there are at most fifty.
    pub fn settled(&self, baseline: &Baseline) -> Result<()> {
        let mut now = self.baseline()?;
        for _ in 0..50 {
            if now == *baseline {
                return Ok(());
            }
            now = self.baseline()?;
        }
        Err(Error::Check(format!(
            "{}: {now:?} in place of {baseline:?}",
            self.name
        )))
    }
}

/// Runs it to its end, which must be with this status.
pub fn ended(command: &mut Command, status: i32) -> Result<Output> {
    let output = command
        .output()
        .naming(|| format!("start `{}`", line(command)))?;
    check(output.status.code() == Some(status), || {
        format!(
            "`{}` left with {}, not {status}: {}",
            line(command),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    Ok(output)
}

/// The first bytes of `seq 1 LINES`.
pub fn sequence(bytes: usize, lines: u64) -> Vec<u8> {
    let mut text = Vec::new();
    for number in 1..=lines {
        if text.len() >= bytes {
            break;
        }
        text.extend(format!("{number}\n").bytes());
    }
    text.truncate(bytes);
    text
}

fn prefix(got: &[u8]) -> Result<()> {
    check(got == sequence(got.len(), u64::MAX), || {
        format!("{} bytes that were received are no prefix", got.len())
    })
}

pub fn check(right: bool, what: impl FnOnce() -> String) -> Result<()> {
    if right {
        Ok(())
    } else {
        Err(Error::Check(what()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_cut_where_asked() {
        assert_eq!(sequence(usize::MAX, 3), b"1\n2\n3\n");
        assert_eq!(sequence(3, u64::MAX), b"1\n2");
        assert_eq!(sequence(0, 9), b"");
        prefix(b"1\n2\n").unwrap();
        prefix(b"1\n3\n").unwrap_err();
    }
}
