//! On the host: execs by every way in, one after another in each round, beside what they are made of.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmm_client::{Deadlines, Ended, Event, Exec, Pool, Session};
use vmm_protocol::{ExecRequest, Stream};

use crate::sandbox::{DEADLINE, NAME, Sandbox, good};
use crate::{Result, busy, guest};

/// Rounds before those that count: caches, and what a first use sets up.
const WARM_UP: u32 = 3;
/// Execs at once.
const BURST: usize = 20;

/// What to measure, from `cargo xtask bench exec`.
#[derive(Deserialize)]
struct Plan {
    vmm: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    /// This program in the guest.
    helper: String,
    rounds: u32,
    /// How much the guest writes to measure its output.
    output_mib: u64,
    /// How many execs the agent's memory is measured around.
    execs: u32,
}

/// A value a round, each in milliseconds unless its name says otherwise.
#[derive(Default, Serialize)]
struct Samples {
    command_ms: Vec<f64>,
    pooled_ms: Vec<f64>,
    fork_ms: Vec<f64>,
    vfork_ms: Vec<f64>,
    echo_ms: Vec<f64>,
    first_byte_ms: Vec<f64>,
    output_mb_s: Vec<f64>,
    /// From the first begun to the last ended.
    burst_all_ms: Vec<f64>,
    /// Each of them.
    burst_ms: Vec<f64>,
    busy: busy::Samples,
}

/// One round's.
struct Round {
    command: Duration,
    pooled: Duration,
    fork: Duration,
    vfork: Duration,
    echo: Duration,
    first_byte: Duration,
    output_mb_s: f64,
    burst_all: Duration,
    burst: Vec<Duration>,
}

/// Measures by the plan and prints the samples. Whatever fails ends it: there is no sample to skip.
pub fn measure(plan: &Path) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&std::fs::read(plan)?)?;
    let sandbox = Sandbox::start(&plan.vmm, &plan.kernel, &plan.initramfs)?;
    let bench = Bench::begin(&sandbox, &plan)?;
    let mut samples = Samples::default();
    for round in 0..WARM_UP + plan.rounds {
        let taken = bench.round()?;
        if round >= WARM_UP {
            samples.take(&taken);
        }
        let session = bench.session()?;
        samples
            .busy
            .round(&session, round >= WARM_UP, plan.output_mib)?;
    }
    samples
        .busy
        .memory(&sandbox, &bench.session()?, plan.execs)?;
    bench.end()?;
    println!("{}", serde_json::to_string(&samples)?);
    Ok(())
}

impl Samples {
    fn take(&mut self, round: &Round) {
        let ms = |time: &Duration| time.as_secs_f64() * 1e3;
        self.command_ms.push(ms(&round.command));
        self.pooled_ms.push(ms(&round.pooled));
        self.fork_ms.push(ms(&round.fork));
        self.vfork_ms.push(ms(&round.vfork));
        self.echo_ms.push(ms(&round.echo));
        self.first_byte_ms.push(ms(&round.first_byte));
        self.output_mb_s.push(round.output_mb_s);
        self.burst_all_ms.push(ms(&round.burst_all));
        self.burst_ms.extend(round.burst.iter().map(ms));
    }
}

/// What rounds have in common.
struct Bench<'a> {
    sandbox: &'a Sandbox,
    pool: Pool,
    deadlines: Deadlines,
    output_mib: u64,
    echo: UnixStream,
    spawn: UnixStream,
    /// The guest's side, over a session that is not the pool's.
    _helper: Exec,
}

impl<'a> Bench<'a> {
    fn begin(sandbox: &'a Sandbox, plan: &Plan) -> Result<Self> {
        let deadlines = Deadlines {
            connect: DEADLINE,
            answer: DEADLINE,
            hello: DEADLINE,
        };
        let session = Session::connect(&sandbox.socket, &sandbox.tag, &deadlines)?;
        let mut helper = session.exec(&ExecRequest::new([plan.helper.as_str(), "serve"]))?;
        let mut said = Vec::new();
        while said != b"ready\n" {
            match helper.next_before(Instant::now() + DEADLINE)? {
                Some(Event::Started { .. }) => {}
                Some(Event::Output { data, .. }) => said.extend_from_slice(&data),
                other => {
                    return Err(format!("{} said {said:?}, then {other:?}", plan.helper).into());
                }
            }
        }
        Ok(Self {
            echo: sandbox.connect(guest::ECHO)?,
            spawn: sandbox.connect(guest::SPAWN)?,
            sandbox,
            pool: Pool::default(),
            deadlines,
            output_mib: plan.output_mib,
            _helper: helper,
        })
    }

    fn round(&self) -> Result<Round> {
        let (burst_all, burst) = self.burst()?;
        Ok(Round {
            command: self.settled(Self::command)?,
            pooled: self.settled(Self::pooled)?,
            fork: self.settled(|bench| bench.spawn(guest::FORK))?,
            vfork: self.settled(|bench| bench.spawn(guest::VFORK))?,
            echo: self.settled(Self::echo)?,
            first_byte: self.settled(Self::first_byte)?,
            output_mb_s: self.settled(Self::output)?,
            burst_all,
            burst,
        })
    }

    /// Takes a sample behind what the last exec left to do in the guest: a ping comes after that.
    fn settled<T>(&self, sample: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        self.session()?.ping(DEADLINE)?;
        sample(self)
    }

    /// The pool's only session was used by all that wanted one.
    fn end(&self) -> Result<()> {
        let counters = self.pool.counters();
        if counters.connected != 1 || counters.lost != 0 {
            return Err(format!("not one session for all: {counters:?}").into());
        }
        Ok(())
    }

    fn session(&self) -> Result<Session> {
        let Sandbox { socket, tag, .. } = self.sandbox;
        Ok(self.pool.session(NAME, socket, tag, &self.deadlines)?)
    }

    /// `vmm exec`, from its spawn to its exit.
    fn command(&self) -> Result<Duration> {
        let mut exec = self.sandbox.exec_true();
        let began = Instant::now();
        good(&mut exec)?;
        Ok(began.elapsed())
    }

    /// The same by a session of the pool.
    fn pooled(&self) -> Result<Duration> {
        let began = Instant::now();
        let ended = self.session()?.exec(&ExecRequest::new(["true"]))?.wait();
        let took = began.elapsed();
        well(&ended)?;
        Ok(took)
    }

    /// A process in the guest, by the guest's clock.
    fn spawn(&self, kind: u8) -> Result<Duration> {
        let mut nanoseconds = [0; 8];
        (&self.spawn).write_all(&[kind])?;
        (&self.spawn).read_exact(&mut nanoseconds)?;
        Ok(Duration::from_nanos(u64::from_le_bytes(nanoseconds)))
    }

    /// A byte to the guest and back.
    fn echo(&self) -> Result<Duration> {
        let mut byte = [0];
        let began = Instant::now();
        (&self.echo).write_all(b"x")?;
        (&self.echo).read_exact(&mut byte)?;
        let took = began.elapsed();
        if byte != *b"x" {
            return Err(format!("the echo of x is {byte:?}").into());
        }
        Ok(took)
    }

    /// From the request to the first byte of `echo`.
    fn first_byte(&self) -> Result<Duration> {
        let began = Instant::now();
        let exec = self.session()?.exec(&ExecRequest::new(["echo", "x"]))?;
        let mut first = None;
        let text = drain(exec, |_| {
            first.get_or_insert_with(|| began.elapsed());
        })?;
        match first {
            Some(first) if text == b"x\n" => Ok(first),
            _ => Err(format!("echo x said {text:?}").into()),
        }
    }

    /// Megabytes a second of an exec's output, from its first bytes to its last.
    fn output(&self) -> Result<f64> {
        let script = format!(
            "dd if=/dev/zero bs=64k count={} 2>/dev/null",
            self.output_mib * 16
        );
        let mut request = ExecRequest::new(["sh", "-c", &script]);
        request.output_limit = None;
        let mut first = None;
        let mut last = Instant::now();
        let bytes = drain(self.session()?.exec(&request)?, |length| {
            last = Instant::now();
            first.get_or_insert((last, length));
        })?;
        let Some((began, head)) = first.filter(|_| bytes.len() as u64 == self.output_mib << 20)
        else {
            return Err(format!("{} bytes came of {} MiB", bytes.len(), self.output_mib).into());
        };
        Ok((bytes.len() - head) as f64 / (last - began).as_secs_f64() / 1e6)
    }

    /// Twenty execs at once over one session: the whole, and each.
    fn burst(&self) -> Result<(Duration, Vec<Duration>)> {
        let session = self.session()?;
        session.ping(DEADLINE)?;
        let barrier = Barrier::new(BURST);
        let one = || -> Result<(Instant, Instant)> {
            barrier.wait();
            let began = Instant::now();
            let ended = session.exec(&ExecRequest::new(["true"]))?.wait();
            let end = Instant::now();
            well(&ended)?;
            Ok((began, end))
        };
        let times = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..BURST).map(|_| scope.spawn(one)).collect();
            let joined = threads.into_iter().map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err("a thread panicked".into()))
            });
            joined.collect::<Result<Vec<_>>>()
        })?;
        let began = times.iter().map(|(began, _)| *began).min();
        let ended = times.iter().map(|(_, ended)| *ended).max();
        let all = began.zip(ended).map(|(began, ended)| ended - began);
        let each = times.iter().map(|(began, ended)| *ended - *began);
        Ok((all.unwrap_or_default(), each.collect()))
    }
}

/// All of an exec's stdout, each part's length told as it comes; an error unless it ends with 0 and an empty stderr.
pub fn drain(exec: Exec, mut came: impl FnMut(usize)) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for event in exec {
        match event {
            Event::Output {
                stream: Stream::Stdout,
                data,
                ..
            } => {
                came(data.len());
                bytes.extend_from_slice(&data);
            }
            Event::Ended(ended) => {
                well(&ended)?;
                return Ok(bytes);
            }
            Event::Started { .. } => {}
            other => return Err(format!("an exec had {other:?}").into()),
        }
    }
    Err("an exec had no end".into())
}

pub fn well(ended: &Ended) -> Result<()> {
    match ended {
        Ended::Exit(record) if record.status() == 0 => Ok(()),
        other => Err(format!("an exec ended otherwise than with 0: {other:?}").into()),
    }
}
