//! One exec's descriptors and processes: carries out what its state machine decides.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use vmm_events::{Interest, Registrar, Source, TimerId};
use vmm_protocol::exec::{Action, Exec, MainEnd, Room, Settings, Stdin};
use vmm_protocol::limits::MAX_COMMAND;
use vmm_protocol::{ClosedWhy, ExecInfo, ExecRequest, Oom, OomScope, StartStage, Stream, Winsize};

use crate::agent::Token;
use crate::cgroup::{Hierarchy, Leaf};
use crate::command::{self, Ends};
use crate::reaper::{Reaper, Status};
use crate::sys::signals;
use crate::sys::spawn::{self, Failure, Progress, Report};

/// Reads of one stream in one turn of the loop: then the others have theirs.
const READS_A_TURN: usize = 4;
/// Reads that empty the largest pipe, of a megabyte, and the store's odd ends before it.
const READS_OUT: usize = 64;
/// End of file, as a terminal in canonical mode takes it.
const END_OF_TRANSMISSION: u8 = 4;

/// An exec from its request to its record.
pub(crate) struct Running<L: Leaf> {
    pub(crate) state: Exec,
    /// Its share of the budget for stores.
    pub(crate) store_bytes: u64,
    /// When its state machine is to be told the time.
    pub(crate) timer: Option<(u64, TimerId)>,
    number: u64,
    pid: u32,
    process: Option<OwnedFd>,
    report: Option<Source<Report>>,
    outputs: [Option<Source<OwnedFd>>; 2],
    stdin: Option<Source<OwnedFd>>,
    input: Stdin,
    stdin_asked: bool,
    /// End-of-file characters still owed to a terminal.
    ends_owed: usize,
    line_open: bool,
    terminal: Option<OwnedFd>,
    leaf: Option<L>,
    watch: Option<Source<OwnedFd>>,
    /// Stdin bytes consumed and not yet credited to the client.
    credit: u64,
    /// The command, for people.
    command: String,
    began: u64,
    /// When something of it moved last; `moved` is for what has since this was looked at.
    progressed: u64,
    moved: bool,
}

/// What an exec needs of the agent to start.
pub(crate) struct Surroundings<'a, H: Hierarchy> {
    pub(crate) hierarchy: &'a mut H,
    pub(crate) registrar: &'a Registrar<Token>,
    pub(crate) reaper: &'a mut Reaper,
    pub(crate) environment: &'a [(&'static str, String)],
    pub(crate) confine: Option<CapabilitySet>,
}

impl<L: Leaf> Running<L> {
    /// Starts what was asked for. A start that fails is an exec too, with a record that says so.
    pub(crate) fn start<H: Hierarchy<Leaf = L>>(
        number: u64,
        request: &ExecRequest,
        surroundings: Surroundings<'_, H>,
        now: u64,
    ) -> Self {
        let settings = Settings::new(request);
        let mut running = Self {
            store_bytes: settings.store_bytes(),
            state: Exec::new(settings, now),
            timer: None,
            number,
            pid: 0,
            process: None,
            report: None,
            outputs: [None, None],
            stdin: None,
            input: Stdin::new(),
            stdin_asked: request.stdin,
            ends_owed: 0,
            line_open: false,
            terminal: None,
            leaf: None,
            watch: None,
            credit: 0,
            command: title(&request.argv),
            began: now,
            progressed: now,
            moved: false,
        };
        if let Err(failure) = running.spawn(request, surroundings) {
            running.close_all();
            running
                .state
                .start_failed(failure.stage, failure.errno.raw_os_error());
        }
        running
    }

    fn spawn<H: Hierarchy<Leaf = L>>(
        &mut self,
        request: &ExecRequest,
        surroundings: Surroundings<'_, H>,
    ) -> Result<(), Failure> {
        let Surroundings {
            hierarchy,
            registrar,
            reaper,
            environment,
            confine,
        } = surroundings;
        let mut leaf = hierarchy.create().map_err(Failure::at(StartStage::Leaf))?;
        let (plan, ends) = command::prepare(request, environment, confine)?;
        self.register(ends, request, registrar)?;
        let into = leaf.enter().map_err(Failure::at(StartStage::Leaf))?;
        let child = spawn::spawn(plan, into)?;
        self.leaf = Some(leaf);
        // In the same turn of the loop: nothing can be collected in between.
        reaper.expect(child.pid, self.number);
        self.pid = child.pid.as_raw_nonzero().get().unsigned_abs();
        self.process = Some(child.pidfd);
        let report = registrar.register(child.report, Interest::READ, Token::Report(self.number));
        self.report = Some(report.map_err(watch_failure)?);
        Ok(())
    }

    fn register(
        &mut self,
        ends: Ends,
        request: &ExecRequest,
        registrar: &Registrar<Token>,
    ) -> Result<(), Failure> {
        let number = self.number;
        let watch = |fd, token| {
            registrar
                .register(fd, Interest::NONE, token)
                .map_err(watch_failure)
        };
        // Deaf until the program runs, so that no byte comes before the word that it does.
        self.outputs[0] = Some(watch(ends.stdout, Token::Output(number, Stream::Stdout))?);
        match ends.stderr {
            Some(stderr) => {
                self.outputs[1] = Some(watch(stderr, Token::Output(number, Stream::Stderr))?);
            }
            None => self.state.close(Stream::Stderr),
        }
        if let Some(stdin) = ends.stdin {
            self.stdin = Some(watch(stdin, Token::Stdin(number))?);
        }
        self.terminal = ends.terminal;
        if !request.stdin {
            self.close_stdin();
        }
        Ok(())
    }

    /// The child has something to report, or has become its program.
    pub(crate) fn report_ready(&mut self) {
        let Some(report) = &mut self.report else {
            return;
        };
        match report.inner_mut().read() {
            Ok(Progress::Pending) => {}
            Ok(Progress::Running) => {
                self.report = None;
                self.moved = true;
                self.state.started(self.number, self.pid);
                self.listen();
                self.write_stdin();
            }
            Err(failure) => {
                self.close_all();
                self.state
                    .start_failed(failure.stage, failure.errno.raw_os_error());
            }
        }
    }

    /// Bytes, or the end, of a stream; how many came.
    pub(crate) fn output_ready(&mut self, stream: Stream, scratch: &mut [u8], now: u64) -> usize {
        let mut bytes = 0;
        for _ in 0..READS_A_TURN {
            match self.read(stream, scratch, now) {
                Some(count) => bytes += count,
                None => break,
            }
        }
        self.listen();
        bytes
    }

    /// One read: how many bytes it had, or `None` if another one would have none.
    fn read(&mut self, stream: Stream, scratch: &mut [u8], now: u64) -> Option<usize> {
        let source = self.outputs[stream.index()].as_ref()?;
        let (result, stored) = match self.state.room(stream) {
            Room::Store(space) => (rustix::io::read(source.inner(), space), true),
            Room::Discard => (rustix::io::read(source.inner(), &mut *scratch), false),
            Room::Wait => return None,
            Room::Closed => {
                self.outputs[stream.index()] = None;
                return None;
            }
        };
        match result {
            Ok(0) => self.end(stream),
            Ok(count) if stored => {
                self.moved = true;
                self.state.commit(stream, count);
                return Some(count);
            }
            Ok(count) => {
                self.moved = true;
                self.state.drop_bytes(stream, count, now);
                return Some(count);
            }
            Err(Errno::INTR) => return Some(0),
            Err(Errno::AGAIN) => {
                if self.state.would_block(stream) {
                    self.outputs[stream.index()] = None;
                }
            }
            // Watched on, it would hang up in every round.
            Err(_) if crate::negative_control("EV02") => {}
            // A terminal whose last user has gone says EIO; nothing else is to be expected.
            Err(_) => self.end(stream),
        }
        None
    }

    /// What the pipe still holds.
    fn read_out(&mut self, stream: Stream, scratch: &mut [u8], now: u64) {
        for _ in 0..READS_OUT {
            if self.read(stream, scratch, now).is_none() {
                return;
            }
        }
        // More than any pipe holds: someone who could not be killed is still writing.
        self.state.would_block(stream);
    }

    fn end(&mut self, stream: Stream) {
        self.outputs[stream.index()] = None;
        self.state.close(stream);
    }

    /// Watches the streams that have room for more, and only those.
    pub(crate) fn listen(&mut self) {
        if self.report.is_some() {
            return;
        }
        for stream in [Stream::Stdout, Stream::Stderr] {
            let interest = match self.state.room(stream) {
                Room::Store(_) | Room::Discard => Interest::READ,
                Room::Wait => Interest::NONE,
                Room::Closed => {
                    self.outputs[stream.index()] = None;
                    continue;
                }
            };
            if let Some(source) = &self.outputs[stream.index()]
                && source.modify(interest).is_err()
            {
                // Out of kernel memory for one more watch: the stream cannot be read any more.
                self.end(stream);
            }
        }
    }

    /// Stdin bytes from the client, within its credit.
    pub(crate) fn push_stdin(&mut self, data: &[u8]) {
        if let Some(last) = data.last() {
            self.line_open = *last != b'\n';
        }
        if self.stdin.is_none() {
            // Nothing reads: given back at once, or the client would wait for ever.
            self.credit += data.len() as u64;
            if !self.stdin_asked {
                self.state.stdin_closed(ClosedWhy::NotAsked);
            }
            return;
        }
        self.input.push(data);
        self.write_stdin();
    }

    /// The client will send no more.
    pub(crate) fn close_stdin(&mut self) {
        if self.terminal.is_some() {
            // An unfinished line takes one to be handed over and one to be the end.
            self.ends_owed = if self.line_open { 2 } else { 1 };
        }
        self.input.close();
        self.write_stdin();
    }

    /// Hands pending bytes over as far as they go; the pipe itself once the program runs, so that
    /// an end that comes early is not lost.
    pub(crate) fn write_stdin(&mut self) {
        if self.report.is_some() || self.process.is_none() {
            return;
        }
        while let Some(source) = &self.stdin {
            let owed = [END_OF_TRANSMISSION; 2];
            let pending = self.input.pending();
            let ends = pending.is_empty() && self.ends_owed > 0;
            let bytes = if ends {
                &owed[..self.ends_owed.min(2)]
            } else {
                pending
            };
            if bytes.is_empty() {
                let _ = source.modify(Interest::NONE);
                // A terminal stays open for its output and its size.
                if self.input.ended() && self.terminal.is_none() {
                    self.stdin = None;
                }
                return;
            }
            match rustix::io::write(source.inner(), bytes) {
                Ok(count) if ends => self.ends_owed -= count.min(self.ends_owed),
                Ok(count) => {
                    self.moved = true;
                    self.credit += self.input.wrote(count);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if source.modify(Interest::WRITE).is_ok() {
                        return;
                    }
                    self.break_stdin();
                }
                Err(_) => self.break_stdin(),
            }
        }
    }

    fn break_stdin(&mut self) {
        self.credit += self.input.broke();
        self.stdin = None;
        self.state.stdin_closed(ClosedWhy::BrokenPipe);
    }

    /// Stdin bytes that the client may send anew.
    pub(crate) fn take_credit(&mut self) -> u64 {
        std::mem::take(&mut self.credit)
    }

    /// Another size for the terminal, if it has one.
    pub(crate) fn resize(&mut self, size: Winsize) {
        if let Some(terminal) = &self.terminal {
            let _ = command::resize(terminal, size);
        }
    }

    /// A signal for the main process; one that is gone needs none.
    pub(crate) fn signal(&mut self, number: u8) {
        if let Some(process) = &self.process {
            let _ = signals::send(process, number);
        }
    }

    /// No signal reaches the main process any more.
    pub(crate) fn main_is_gone(&self) -> bool {
        self.process.is_none()
    }

    /// What a list tells of it; whom it belongs to others know.
    pub(crate) fn info(&self, now: u64) -> ExecInfo {
        let record = self.state.record();
        let cpu_ns = match (record, &self.leaf) {
            (Some(record), _) => record.cpu_ns,
            (None, Some(leaf)) => leaf.usage().cpu_ns,
            (None, None) => 0,
        };
        let both = [Stream::Stdout, Stream::Stderr];
        ExecInfo {
            exec: self.number,
            pid: self.pid,
            state: self.state.state(),
            kept: false,
            clients: 0,
            earliest: both.map(|stream| self.state.earliest(stream)),
            length: both.map(|stream| self.state.length(stream)),
            store_bytes: self.store_bytes,
            age_ns: now.saturating_sub(self.began),
            progress_ns: now.saturating_sub(self.progressed),
            cpu_ns,
            end: record.map(|record| (record.cause.kind(), record.status())),
            command: self.command.clone(),
        }
    }

    /// The main process was collected.
    pub(crate) fn main_exited(&mut self, status: Status, now: u64) {
        // Whatever it had to report is in the pipe by now.
        self.report_ready();
        self.moved = true;
        self.process = None;
        if self.populated() == Some(false) {
            self.state.leaf_empty();
        }
        if let Some(oom) = self.memory_kill() {
            self.state.oom(oom, status == Status::Signaled(9));
        }
        let end = match status {
            Status::Exited(code) => MainEnd::Exited(code),
            Status::Signaled(signal) => MainEnd::Signaled(signal),
            Status::Unknown => MainEnd::Unknown("the kernel gave no status".to_owned()),
        };
        self.state.main_exited(end, now);
    }

    /// What the leaf says of kills for memory. Which process it was the kernel does not tell here:
    /// a main process that died of SIGKILL is taken for the victim, unless the agent killed it,
    /// which the state machine puts first.
    fn memory_kill(&self) -> Option<Oom> {
        let leaf = self.leaf.as_ref()?;
        if leaf.oom_kills() == 0 {
            return None;
        }
        let usage = leaf.usage();
        Some(Oom {
            scope: if usage.memory_limit.is_some() {
                OomScope::Exec
            } else {
                OomScope::Guest
            },
            pid: 0,
            victim: String::new(),
            limit: usage.memory_limit.unwrap_or(0),
            peak: usage.peak_memory,
        })
    }

    /// The leaf may have become empty.
    pub(crate) fn leaf_changed(&mut self) {
        match self.populated() {
            Some(false) => {
                self.watch = None;
                self.state.leaf_empty();
            }
            Some(true) => {}
            None => self.watch = None,
        }
    }

    fn populated(&self) -> Option<bool> {
        let watch = self.watch.as_ref().map(|watch| watch.inner().as_fd());
        self.leaf.as_ref()?.populated(watch).ok()
    }

    /// Does what the state machine asks for until it has no more to ask; whether the exec has
    /// ended.
    pub(crate) fn settle(
        &mut self,
        registrar: &Registrar<Token>,
        finished: &mut Vec<Lingering<L>>,
        scratch: &mut [u8],
        now: u64,
    ) -> bool {
        if std::mem::take(&mut self.moved) {
            self.progressed = now;
        }
        while let Some(action) = self.state.action() {
            match action {
                Action::Signal(number) => self.signal(number),
                Action::KillLeaf => self.kill_leaf(registrar),
                Action::ReadOut => {
                    for stream in [Stream::Stdout, Stream::Stderr] {
                        self.read_out(stream, scratch, now);
                    }
                }
                Action::Finish => {
                    self.finish(finished, now);
                    return true;
                }
            }
        }
        self.listen();
        false
    }

    /// Kills all of it, whatever its state machine thinks: the guest goes down.
    pub(crate) fn kill(&mut self) {
        if let Some(leaf) = &mut self.leaf {
            let _ = leaf.kill();
        }
    }

    fn kill_leaf(&mut self, registrar: &Registrar<Token>) {
        if crate::negative_control("EX02") {
            // Only the main process: what a descendant elsewhere does is then nobody's business.
            return self.signal(9);
        }
        let Some(leaf) = &mut self.leaf else { return };
        // A leaf that cannot be killed shows as one that does not empty.
        let _ = leaf.kill();
        if self.watch.is_none()
            && let Ok(Some(watch)) = leaf.watch()
        {
            let token = Token::Leaf(self.number);
            self.watch = registrar.register(watch, Interest::PRIORITY, token).ok();
        }
        self.leaf_changed();
    }

    fn finish(&mut self, finished: &mut Vec<Lingering<L>>, now: u64) {
        self.close_all();
        let usage = self.leaf.as_ref().map(Leaf::usage).unwrap_or_default();
        if let Some(leaf) = self.leaf.take() {
            self.watch = None;
            finished.push(Lingering {
                number: self.number,
                leaf,
                watch: None,
            });
        }
        let usage = vmm_protocol::exec::Usage {
            cpu_ns: usage.cpu_ns,
            peak_memory: usage.peak_memory,
            unproven: false,
        };
        self.state.finish(usage, now);
    }

    fn close_all(&mut self) {
        self.report = None;
        self.outputs = [None, None];
        self.stdin = None;
        self.terminal = None;
    }
}

/// The leaf of an exec that has ended, for the time until it can be removed.
pub(crate) struct Lingering<L: Leaf> {
    pub(crate) number: u64,
    leaf: L,
    watch: Option<Source<OwnedFd>>,
}

impl<L: Leaf> Lingering<L> {
    /// Removes the leaf; if that cannot be yet, what is to be tried again when there is a reason to.
    pub(crate) fn leave(mut self, registrar: &Registrar<Token>) -> Option<Self> {
        if self.leaf.remove().is_ok() {
            return None;
        }
        // The last process is still on its way out, or will not go at all.
        let _ = self.leaf.kill();
        self.watch = self.leaf.watch().ok().flatten().and_then(|watch| {
            registrar
                .register(watch, Interest::PRIORITY, Token::Leaf(self.number))
                .ok()
        });
        Some(self)
    }

    /// Tries again; whether it is gone.
    pub(crate) fn retry(&mut self) -> bool {
        // Reading it rearms the watch.
        let watch = self.watch.as_ref().map(|watch| watch.inner().as_fd());
        let _ = self.leaf.populated(watch);
        self.leaf.remove().is_ok()
    }
}

/// The first words of a command, on one line.
fn title(argv: &[Vec<u8>]) -> String {
    let mut text = String::new();
    for word in argv {
        if !text.is_empty() {
            text.push(' ');
        }
        let word = word.get(..MAX_COMMAND).unwrap_or(word);
        text.extend(
            String::from_utf8_lossy(word)
                .chars()
                .map(|c| if c.is_control() { ' ' } else { c }),
        );
        if text.len() >= MAX_COMMAND {
            text.truncate(text.floor_char_boundary(MAX_COMMAND));
            break;
        }
    }
    text
}

fn watch_failure(_: vmm_events::Error) -> Failure {
    Failure {
        stage: StartStage::Pipes,
        errno: Errno::NOMEM,
    }
}
