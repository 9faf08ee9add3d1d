//! Execs that outlive their clients, and stdin, under soak.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::sandbox::{ENDLESS, Sandbox, check, ended, sequence};
use crate::error::{Error, Naming, Result};
use crate::process::line;

impl Sandbox {
    /// What goes in comes out, and the end of it is seen.
    pub fn echoed(&self, lines: u64) -> Result<()> {
        let flags = ["-i", "--output-limit", "none"];
        let mut command = self.exec(&flags, "cat; exit 3");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .naming(|| format!("start `{}`", line(&command)))?;
        let text = sequence(usize::MAX, lines);
        let written = child.stdin.take().map(|mut stdin| {
            let text = text.clone();
            std::thread::spawn(move || stdin.write_all(&text))
        });
        let output = child
            .wait_with_output()
            .naming(|| "wait for vmm exec".into())?;
        let written = written.and_then(|thread| thread.join().ok());
        check(matches!(written, Some(Ok(()))), || {
            format!("stdin was not taken: {written:?}")
        })?;
        let right = output.stdout == text && output.status.code() == Some(3);
        check(right, || {
            format!(
                "{} of {} bytes came back, {}",
                output.stdout.len(),
                text.len(),
                output.status
            )
        })
    }

    /// One that has ended: its rest from anywhere, twice the same, until it is released.
    pub fn kept(&self, lines: u64, from: u64) -> Result<()> {
        let exec = self.detach(&[], &format!("seq 1 {lines}; exit 5"))?;
        self.waited(&exec, "5")?;
        let whole = sequence(usize::MAX, lines);
        let from = (from as usize).min(whole.len());
        for _ in 0..2 {
            let mut attach = self.attach(&exec, from);
            let rest = ended(&mut attach, 5)?.stdout;
            check(rest == whole[from..], || {
                format!("{} bytes from {from} are wrong", rest.len())
            })?;
        }
        self.release(&exec)
    }

    /// A client is lost in the middle, another goes on where that one was, and the exec is cancelled.
    pub fn taken_over(&self, bytes: u64) -> Result<()> {
        let flags = ["--output-limit", "none"];
        let exec = self.detach(&flags, &format!("seq 1 {ENDLESS}"))?;
        let mut got = Vec::new();
        for _ in 0..2 {
            let mut command = self.attach(&exec, got.len());
            command.stdout(Stdio::piped()).stderr(Stdio::null());
            let mut child = command
                .spawn()
                .naming(|| format!("start `{}`", line(&command)))?;
            let mut stdout = child
                .stdout
                .take()
                .ok_or_else(|| Error::Check("no stdout".into()))?;
            let mut some = vec![0; bytes as usize + 1];
            stdout
                .read_exact(&mut some)
                .naming(|| "read the output".into())?;
            child.kill().naming(|| "kill vmm attach".into())?;
            // What had come by then counts as received: the ring may have let it go.
            stdout
                .read_to_end(&mut some)
                .naming(|| "read the output".into())?;
            child.wait().naming(|| "wait for vmm attach".into())?;
            got.extend(some);
        }
        check(got == sequence(got.len(), u64::MAX), || {
            format!("{} bytes of two clients have a gap or a repeat", got.len())
        })?;
        self.number("cancel", &exec, &["--time", "0"])?;
        self.waited(&exec, "137")?;
        self.release(&exec)
    }

    /// A signal to one that nobody is attached to.
    pub fn signalled(&self) -> Result<()> {
        let exec = self.detach(&[], "setsid sleep 1000 & exec sleep 1000")?;
        self.number("kill", &exec, &["-s", "USR1"])?;
        self.waited(&exec, "138")?;
        self.release(&exec)
    }

    /// How many execs its agent keeps.
    pub fn execs(&self) -> Result<usize> {
        let row: Value = self.row("ps")?;
        let execs = row["execs"].as_array().map(Vec::len);
        execs.ok_or_else(|| Error::Check(format!("no execs in {row}")))
    }

    fn detach(&self, flags: &[&str], script: &str) -> Result<String> {
        let flags = [&["--detach"], flags].concat();
        let output = ended(&mut self.exec(&flags, script), 0)?;
        let number = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        check(number.parse::<u64>().is_ok(), || {
            format!("exec --detach printed {number:?}")
        })?;
        Ok(number)
    }

    fn attach(&self, exec: &str, from: usize) -> Command {
        let mut command = self.command("attach");
        command.args([exec, "--from", &format!("{from},0")]);
        command
    }

    fn number(&self, verb: &str, exec: &str, flags: &[&str]) -> Result<Vec<u8>> {
        let mut command = self.command(verb);
        Ok(ended(command.arg(exec).args(flags), 0)?.stdout)
    }

    fn waited(&self, exec: &str, status: &str) -> Result<()> {
        let printed = self.number("wait", exec, &[])?;
        check(printed.trim_ascii() == status.as_bytes(), || {
            format!(
                "exec {exec} ended with {}, not {status}",
                String::from_utf8_lossy(&printed)
            )
        })
    }

    fn release(&self, exec: &str) -> Result<()> {
        self.number("release", exec, &[]).map(drop)
    }
}
