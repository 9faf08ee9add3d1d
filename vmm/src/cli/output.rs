//! What a command's events become on our own streams: the bytes themselves, or JSON lines.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use vmm_client::{Ended, Event};
use vmm_protocol::{Cause, Record, Stream};

/// Bytes that a pipe on stdout should hold.
const PIPE: usize = 1 << 20;
use super::status_file;
use crate::exits::lock;
use crate::sandbox::LogFile;

/// Version of the JSON lines, in the first of them.
const SCHEMA: u32 = 1;

/// Our stdout and stderr, unbuffered: bytes go out as they come.
pub struct Output {
    stdout: Box<dyn Write + Send>,
    stderr: Box<dyn Write + Send>,
    /// JSON lines, and whether the first one is out.
    json: Option<bool>,
    status_file: Option<status_file::Open>,
}

impl Output {
    /// The process's own streams.
    ///
    /// # Errors
    /// When one of them is closed, or no descriptor is left.
    pub fn of_process(json: bool) -> io::Result<Self> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?;
        let stderr = io::stderr().as_fd().try_clone_to_owned()?;
        enlarge(&stdout);
        Ok(Self {
            stdout: Box::new(File::from(stdout)),
            stderr: Box::new(File::from(stderr)),
            json: json.then_some(false),
            status_file: None,
        })
    }

    /// One log for both streams, in the order in which they came.
    #[must_use]
    pub fn to_log(log: LogFile, json: bool) -> Self {
        let log = Shared(Arc::new(Mutex::new(log)));
        Self {
            stdout: Box::new(log.clone()),
            stderr: Box::new(log),
            json: json.then_some(false),
            status_file: None,
        }
    }

    /// With a file for how it ends.
    #[must_use]
    pub fn with_status_file(mut self, file: Option<status_file::Open>) -> Self {
        self.status_file = file;
        self
    }

    /// Writes what an event has to show.
    ///
    /// # Errors
    /// When stdout cannot be written; a stderr that is gone is no reason to end anything.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
        if let Event::Ended(ended) = event
            && let Some(file) = self.status_file.take()
            && let Err(error) = file.write(&exit_object(ended))
        {
            super::say(&format!("vmm: {}", super::chain(&error)));
        }
        let Some(first_is_out) = &mut self.json else {
            return self.raw(event);
        };
        let mut line = object(event);
        if !*first_is_out && let Some(line) = line.as_object_mut() {
            line.insert("schema".to_owned(), SCHEMA.into());
        }
        *first_is_out = true;
        let mut bytes = line.to_string().into_bytes();
        bytes.push(b'\n');
        self.stdout.write_all(&bytes)
    }

    fn raw(&mut self, event: &Event) -> io::Result<()> {
        match event {
            Event::Output {
                stream: Stream::Stdout,
                data,
                ..
            } => self.stdout.write_all(data),
            Event::Output {
                stream: Stream::Stderr,
                data,
                ..
            } => {
                let _ = self.stderr.write_all(data);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// A log with two writers.
#[derive(Clone)]
struct Shared(Arc<Mutex<LogFile>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Gives a pipe room for several frames: who reads it is then woken less often. Anything else has no such size, and a
/// pipe that cannot grow works as well.
fn enlarge(stdout: &OwnedFd) {
    if rustix::pipe::fcntl_getpipe_size(stdout).is_ok_and(|size| size < PIPE) {
        let _ = rustix::pipe::fcntl_setpipe_size(stdout, PIPE);
    }
}

/// An event as its JSON object (design section 6).
fn object(event: &Event) -> Value {
    match event {
        Event::Started { exec, pid } => json!({"event": "started", "exec": exec, "pid": pid}),
        Event::Output {
            stream,
            offset,
            data,
        } => json!({
            "event": "output", "stream": stream.name(), "offset": offset, "data_b64": base64(data),
        }),
        Event::Limit([stdout, stderr]) => {
            json!({"event": "limit", "stdout": stdout, "stderr": stderr})
        }
        Event::Oom(oom) => json!({
            "event": "oom", "scope": oom.scope.name(), "pid": oom.pid, "victim": oom.victim,
            "limit": oom.limit, "peak": oom.peak,
        }),
        Event::StdinClosed(why) => json!({"event": "stdin_closed", "why": why.name()}),
        Event::Ended(ended) => exit_object(ended),
    }
}

/// How a command ended, as `--json` and `--status-file` have it.
pub fn exit_object(ended: &Ended) -> Value {
    let mut line = match ended {
        Ended::Exit(record) => of_record(record),
        Ended::Refused(refusal) => json!({
            "cause": "lost", "reason": format!("refused ({}): {refusal}", refusal.code.name()),
        }),
        Ended::Lost(lost) => json!({
            "cause": "lost", "reason": lost.reason,
            "received": {"stdout": lost.received[0], "stderr": lost.received[1]},
        }),
    };
    if let Some(line) = line.as_object_mut() {
        line.insert("event".to_owned(), "exit".into());
        line.insert("status".to_owned(), ended.status().into());
    }
    line
}

fn of_record(record: &Record) -> Value {
    let counts = record.streams.map(|counts| {
        json!({"seen": counts.seen, "forwarded": counts.forwarded, "dropped": counts.dropped})
    });
    let [stdout, stderr] = counts;
    let mut line = json!({
        "cause": record.cause.name(),
        "counts": {"stdout": stdout, "stderr": stderr},
        "truncated": record.truncated,
        "limited": record.limited,
        "leaf_empty": record.leaf_empty,
        "containment_unproven": record.unproven,
        "wall_ns": record.wall_ns,
        "cpu_ns": record.cpu_ns,
        "peak_memory": record.peak_memory,
    });
    let detail = match &record.cause {
        Cause::Exited(code) => json!({"code": code}),
        Cause::Signaled(signal) => json!({"signal": signal, "signal_name": signal_name(*signal)}),
        Cause::OomKilled(oom) => json!({
            "oom": {"scope": oom.scope.name(), "pid": oom.pid, "victim": oom.victim, "limit": oom.limit, "peak": oom.peak},
        }),
        Cause::Cancelled(reason) => json!({"reason": reason.name()}),
        Cause::StartFailed { stage, errno } => json!({
            "stage": stage.name(), "errno": errno,
            "message": io::Error::from_raw_os_error(*errno).to_string(),
        }),
        Cause::Lost(reason) => json!({"reason": reason}),
        Cause::TimedOut | Cause::OutputLimit => json!({}),
    };
    if let (Some(line), Value::Object(detail)) = (line.as_object_mut(), detail) {
        line.extend(detail);
    }
    line
}

/// Names of the signals that end processes (signal(7), x86).
fn signal_name(number: u8) -> String {
    match usize::from(number)
        .checked_sub(1)
        .and_then(|index| super::units::SIGNALS.get(index))
    {
        Some(name) => format!("SIG{name}"),
        None => format!("SIG{number}"),
    }
}

/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let word = group
            .iter()
            .fold(0u32, |word, &byte| (word << 8) | u32::from(byte))
            << (8 * (3 - group.len()));
        for place in 0..4 {
            if place <= group.len() {
                text.push(char::from(DIGITS[(word >> (18 - 6 * place)) as usize & 63]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};
    use vmm_protocol::{CancelReason, Counts, StartStage};

    fn shown(json: bool, events: &[Event]) -> (String, String) {
        let mut files = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let [stdout, stderr] = [0, 1].map(|index: usize| files[index].try_clone().unwrap());
        let mut output = Output {
            stdout: Box::new(stdout),
            stderr: Box::new(stderr),
            json: json.then_some(false),
            status_file: None,
        };
        for event in events {
            output.event(event).unwrap();
        }
        let [stdout, stderr] = [0, 1].map(|index: usize| {
            let mut text = String::new();
            files[index].rewind().unwrap();
            files[index].read_to_string(&mut text).unwrap();
            text
        });
        (stdout, stderr)
    }

    fn record(cause: Cause) -> Record {
        Record {
            cause,
            streams: [
                Counts {
                    seen: 5,
                    forwarded: 3,
                    dropped: 2,
                },
                Counts::default(),
            ],
            truncated: false,
            limited: true,
            leaf_empty: true,
            unproven: false,
            wall_ns: 1,
            cpu_ns: 2,
            peak_memory: 3,
        }
    }

    fn events() -> [Event; 4] {
        [
            Event::Started { exec: 1, pid: 9 },
            Event::Output {
                stream: Stream::Stdout,
                offset: 0,
                data: b"out".to_vec().into(),
            },
            Event::Output {
                stream: Stream::Stderr,
                offset: 0,
                data: b"err".to_vec().into(),
            },
            Event::Ended(Ended::Exit(Box::new(record(Cause::Exited(7))))),
        ]
    }

    #[test]
    fn bytes_go_to_their_own_streams_and_nothing_else_does() {
        assert_eq!(
            shown(false, &events()),
            ("out".to_owned(), "err".to_owned())
        );
    }

    #[test]
    fn json_is_one_object_a_line_with_the_schema_in_the_first() {
        let (stdout, stderr) = shown(true, &events());
        assert_eq!(stderr, "");
        let lines: Vec<Value> = stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(
            lines[0],
            json!({"event": "started", "exec": 1, "pid": 9, "schema": 1})
        );
        assert_eq!(
            lines[1],
            json!({"event": "output", "stream": "stdout", "offset": 0, "data_b64": "b3V0"})
        );
        assert_eq!(lines[2]["stream"], "stderr");
        assert_eq!(
            (&lines[3]["event"], &lines[3]["cause"]),
            (&json!("exit"), &json!("exited"))
        );
        assert_eq!(
            (&lines[3]["code"], &lines[3]["status"]),
            (&json!(7), &json!(7))
        );
        assert_eq!(
            lines[3]["counts"]["stdout"],
            json!({"seen": 5, "forwarded": 3, "dropped": 2})
        );
        assert_eq!(lines.len(), 4);
    }

    #[test]
    fn every_cause_has_its_name_status_and_detail() {
        let of = |cause| object(&Event::Ended(Ended::Exit(Box::new(record(cause)))));
        assert_eq!(of(Cause::Signaled(9))["signal_name"], "SIGKILL");
        assert_eq!(of(Cause::Signaled(40))["signal_name"], "SIG40");
        assert_eq!(of(Cause::TimedOut)["status"], 124);
        assert_eq!(of(Cause::OutputLimit)["status"], 125);
        assert_eq!(of(Cause::Cancelled(CancelReason::Interrupt))["status"], 130);
        let failed = of(Cause::StartFailed {
            stage: StartStage::Execute,
            errno: 2,
        });
        assert_eq!(
            (&failed["status"], &failed["errno"]),
            (&json!(127), &json!(2))
        );
        let lost = vmm_client::Lost {
            reason: "gone".to_owned(),
            received: [4, 0],
        };
        let lost = object(&Event::Ended(Ended::Lost(lost)));
        assert_eq!(
            (&lost["cause"], &lost["status"]),
            (&json!("lost"), &json!(125))
        );
    }

    #[test]
    fn base64_has_the_vectors_of_the_rfc() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }
}
