//! A busy guest: nineteen execs beside one that floods, a cancel and a kill under load, and what thousands of execs
//! leave in the agent.

use std::io::Write;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde::Serialize;
use vmm_client::{Ended, Event, Exec, Session};
use vmm_protocol::{CancelReason, Cause, ExecRequest};

use crate::Result;
use crate::host::{drain, well};
use crate::sandbox::{DEADLINE, Sandbox};

/// Execs at once, besides the one that floods.
const OTHERS: usize = 19;
/// What has come of a flood before others start.
const FLOWS: usize = 1 << 20;
/// Execs that want the processor while one is cancelled or killed.
const LOAD: usize = 4;
/// Between asking a process to go and killing it.
const GRACE: Duration = Duration::from_millis(100);
const SIGKILL: u8 = 9;

/// A value a round, each in milliseconds unless its name says otherwise.
#[derive(Default, Serialize)]
pub struct Samples {
    /// The median of nineteen: from the request to the first byte.
    others_ms: Vec<f64>,
    /// The same beside an exec that floods.
    flooded_ms: Vec<f64>,
    /// From the cancel to the record, less the grace where it was used up.
    cancel_ms: Vec<f64>,
    kill_ms: Vec<f64>,
    stdin_mb_s: Vec<f64>,
    /// Execs between the next two.
    execs: u32,
    /// The agent's memory before and after.
    resident_bytes: [u64; 2],
}

impl Samples {
    /// One round's, over a session that nobody else uses meanwhile.
    pub fn round(&mut self, session: &Session, counts: bool, stdin_mib: u64) -> Result<()> {
        let mut taken = Self::default();
        taken.others_ms.push(ms(first_bytes(session)?));
        taken.flooded_ms.push(ms(beside_a_flood(session)?));
        taken.under_load(session)?;
        taken.stdin_mb_s.push(stdin(session, stdin_mib)?);
        if counts {
            self.others_ms.append(&mut taken.others_ms);
            self.flooded_ms.append(&mut taken.flooded_ms);
            self.cancel_ms.append(&mut taken.cancel_ms);
            self.kill_ms.append(&mut taken.kill_ms);
            self.stdin_mb_s.append(&mut taken.stdin_mb_s);
        }
        Ok(())
    }

    fn under_load(&mut self, session: &Session) -> Result<()> {
        let load: Vec<Exec> = (0..LOAD)
            .map(|_| started(session, "while :; do :; done", false))
            .collect::<Result<_>>()?;
        for (script, grace) in [
            ("exec sleep 600", Duration::ZERO),
            ("while :; do echo flood; done", Duration::ZERO),
            ("trap '' TERM; while :; do sleep 600; done", GRACE),
        ] {
            let exec = started(session, script, true)?;
            let began = Instant::now();
            exec.control().cancel(CancelReason::Request, GRACE)?;
            cancelled(exec)?;
            self.cancel_ms
                .push(ms(began.elapsed().saturating_sub(grace)));
        }
        let exec = started(session, "exec sleep 600", true)?;
        let began = Instant::now();
        exec.control().signal(SIGKILL)?;
        match exec.wait() {
            Ended::Exit(record) if record.cause == Cause::Signaled(SIGKILL) => {}
            other => return Err(format!("killed, but {other:?}").into()),
        }
        self.kill_ms.push(ms(began.elapsed()));
        for exec in load {
            exec.control()
                .cancel(CancelReason::Request, Duration::ZERO)?;
            cancelled(exec)?;
        }
        Ok(())
    }

    /// The agent's memory around many execs.
    pub fn memory(&mut self, sandbox: &Sandbox, session: &Session, execs: u32) -> Result<()> {
        let before = sandbox.agent_memory()?;
        for _ in 0..execs {
            well(&session.exec(&ExecRequest::new(["true"]))?.wait())?;
        }
        self.execs = execs;
        self.resident_bytes = [before, sandbox.agent_memory()?];
        Ok(())
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Nineteen at once: the median of their first bytes' times.
fn first_bytes(session: &Session) -> Result<Duration> {
    session.ping(DEADLINE)?;
    let barrier = Barrier::new(OTHERS);
    let one = |number: usize| -> Result<Duration> {
        let word = number.to_string();
        barrier.wait();
        let began = Instant::now();
        let exec = session.exec(&ExecRequest::new(["echo", &word]))?;
        let mut first = None;
        let said = drain(exec, |_| {
            first.get_or_insert_with(|| began.elapsed());
        })?;
        match first {
            Some(first) if said == format!("{number}\n").as_bytes() => Ok(first),
            _ => Err(format!("echo {number} said {said:?}").into()),
        }
    };
    let mut times = std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..OTHERS)
            .map(|number| scope.spawn(move || one(number)))
            .collect();
        let joined = threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err("a thread panicked".into()))
        });
        joined.collect::<Result<Vec<_>>>()
    })?;
    times.sort_unstable();
    Ok(times[OTHERS / 2])
}

fn beside_a_flood(session: &Session) -> Result<Duration> {
    let mut request = ExecRequest::new(["yes"]);
    request.output_limit = None;
    let mut flood = session.exec(&request)?;
    let mut seen = 0;
    while seen < FLOWS {
        match flood.next_before(Instant::now() + DEADLINE)? {
            Some(Event::Started { .. }) => {}
            Some(Event::Output { data, .. }) => seen += data.len(),
            other => return Err(format!("a flood had {other:?}").into()),
        }
    }
    let control = flood.control();
    // It is read all the time: what the others wait for is not that it is held up.
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || cancelled(flood));
        let taken = first_bytes(session);
        control.cancel(CancelReason::Request, Duration::ZERO)?;
        reader
            .join()
            .unwrap_or_else(|_| Err("the flood's reader panicked".into()))?;
        taken
    })
}

/// Megabytes a second into an exec that reads them all.
fn stdin(session: &Session, mib: u64) -> Result<f64> {
    let mut request = ExecRequest::new(["sh", "-c", "cat >/dev/null"]);
    request.stdin = true;
    let mut exec = session.exec(&request)?;
    let mut input = exec.stdin().ok_or("no stdin")?;
    let block = [0; 64 << 10];
    let began = Instant::now();
    for _ in 0..mib * 16 {
        input.write_all(&block)?;
    }
    drop(input);
    well(&exec.wait())?;
    Ok((mib << 20) as f64 / began.elapsed().as_secs_f64() / 1e6)
}

/// A script whose process runs.
fn started(session: &Session, script: &str, flood: bool) -> Result<Exec> {
    let mut request = ExecRequest::new(["sh", "-c", script]);
    // A flood shall end by the cancel and not by its cap.
    if flood {
        request.output_limit = None;
    }
    let mut exec = session.exec(&request)?;
    match exec.next_before(Instant::now() + DEADLINE)? {
        Some(Event::Started { .. }) => Ok(exec),
        other => Err(format!("{script:?} did not start but {other:?}").into()),
    }
}

/// The rest of an exec that is being cancelled.
fn cancelled(exec: Exec) -> Result<()> {
    match exec.wait() {
        Ended::Exit(record) if record.cause == Cause::Cancelled(CancelReason::Request) => Ok(()),
        other => Err(format!("cancelled, but {other:?}").into()),
    }
}
