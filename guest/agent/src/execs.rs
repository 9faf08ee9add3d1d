//! The execs of the guest: who has to do with each, how long it is kept, and what is asked of it by its number.
//!
//! ```text
//!   Exec -- owner: the session that started it, whose loss ends it; none of a detached one
//!        -- links: requests of sessions (its owner's, attach, wait), each perhaps a reader of its output
//!        -- kept:  detached, or older than the present life: goes by release alone
//!   ended, not kept, no link  -->  forgotten
//! ```

use std::collections::BTreeMap;

use vmm_protocol::exec::{AttachError, Reader, Settings};
use vmm_protocol::limits::{MAX_LISTED, MAX_NUMBERS};
use vmm_protocol::session::Ask;
use vmm_protocol::{CauseKind, ExecRequest, ExecState, ExecsPage, Refusal, RefusedCode};

use crate::agent::Agent;
use crate::cgroup::Leaf;
use crate::leaving::GOODBYE;
use crate::platform::Platform;
use crate::running::Running;
use crate::sessions::Connection;

/// The execs of the guest, by their number.
pub(crate) type Execs<L> = BTreeMap<u64, Exec<L>>;

/// A request of a session: the session's key, and the id in it.
pub(crate) type Link = (u64, u64);

/// An exec and whom it belongs to.
pub(crate) struct Exec<L: Leaf> {
    pub(crate) running: Running<L>,
    /// The request that started it; `None` once that session is gone, or if it never belonged to one.
    pub(crate) owner: Option<Link>,
    /// Requests that are not over, and those of them that take its output.
    pub(crate) links: BTreeMap<Link, Option<Reader>>,
    /// It has its record.
    pub(crate) ended: bool,
    /// It is not forgotten before it is released.
    pub(crate) kept: bool,
}

impl<L: Leaf> Exec<L> {
    /// One that a request has just started.
    pub(crate) fn new(running: Running<L>, link: Link, detached: bool) -> Self {
        Self {
            running,
            owner: (!detached).then_some(link),
            links: [(link, (!detached).then_some(Reader::FIRST))].into(),
            ended: false,
            kept: detached,
        }
    }

    /// Nobody will ask for it again.
    pub(crate) fn over(&self) -> bool {
        self.ended && !self.kept && self.links.is_empty()
    }

    /// From now on it outlives whoever it belonged to.
    pub(crate) fn keep(&mut self) {
        self.owner = None;
        self.kept = true;
        self.running.state.keep();
    }
}

impl<P: Platform> Agent<'_, P> {
    /// Takes a request off its exec.
    pub(crate) fn unlink(&mut self, number: u64, link: Link) {
        let Some(exec) = self.execs.get_mut(&number) else {
            return;
        };
        if let Some(Some(reader)) = exec.links.remove(&link) {
            exec.running.state.detach(reader);
        }
        if exec.owner == Some(link) {
            exec.owner = None;
        }
        // There may be room for more output now, or nobody left to keep it for.
        self.settle(number);
    }

    /// Tells every session that has to do with an exec what there is of it.
    pub(crate) fn flush_links(&mut self, number: u64) {
        let Some(exec) = self.execs.get(&number) else {
            return;
        };
        // One is the rule, and needs no list.
        let mut rest = exec.links.keys().map(|(session, _)| *session);
        let (first, others): (_, Vec<u64>) = (rest.next(), rest.collect());
        for session in first.into_iter().chain(others) {
            self.flush(session);
        }
    }

    /// Whether there is room for one more exec.
    pub(crate) fn admit(&self, request: &ExecRequest) -> Result<(), Refusal> {
        if self.leaving.is_some() {
            return Err(Refusal::new(RefusedCode::GoingDown, GOODBYE));
        }
        let unreleased = || {
            let kept = self
                .execs
                .iter()
                .filter(|(_, exec)| exec.ended && exec.kept);
            kept.map(|(number, _)| *number).take(MAX_NUMBERS).collect()
        };
        if self.execs.len() >= self.limits.execs {
            let numbers: Vec<u64> = unreleased();
            let message = format!(
                "the guest has {} execs, its limit{}",
                self.limits.execs,
                remedy(&numbers)
            );
            return Err(refusal(RefusedCode::TooManyExecs, message, numbers));
        }
        let asked = Settings::new(request).store_bytes();
        let (used, all) = (self.store_bytes, self.limits.store_bytes);
        if used.saturating_add(asked) > all {
            let holders = self
                .execs
                .iter()
                .filter(|(_, exec)| exec.running.store_bytes > 0);
            let holders: Vec<u64> = holders
                .map(|(number, _)| *number)
                .take(MAX_NUMBERS)
                .collect();
            let message = format!(
                "its output could take {asked} bytes, and {used} of {all} are held by {} execs: {}{}",
                self.execs.len(),
                listed(&holders),
                remedy(&unreleased()),
            );
            return Err(refusal(RefusedCode::NoBudget, message, holders));
        }
        Ok(())
    }

    /// Acts on a request about an exec by its number. The connection is in hand, not in the map.
    pub(crate) fn asked(&mut self, key: u64, connection: &mut Connection, id: u64, ask: Ask) {
        match ask {
            Ask::Attach { exec, from } => {
                let link = (key, id);
                match self.link(exec, |exec| exec.running.state.attach(from).map(Some), link) {
                    Ok(()) => drop(connection.ids.insert(id, exec)),
                    Err(refusal) => connection.session.refuse(id, refusal),
                }
            }
            Ask::Wait { exec } => match self.link(exec, |_| Ok(None), (key, id)) {
                Ok(()) => drop(connection.ids.insert(id, exec)),
                Err(refusal) => connection.session.refuse(id, refusal),
            },
            Ask::List { after } => {
                let page = self.page(after);
                connection.session.list(id, page);
            }
            Ask::Signal { exec, signal } => {
                let result = self.find(exec).and_then(|found| {
                    if found.ended || found.running.main_is_gone() {
                        let message = format!("exec {exec} has ended: a signal reaches nobody");
                        return Err(Refusal::new(RefusedCode::HasEnded, message));
                    }
                    found.running.signal(signal);
                    Ok(())
                });
                connection.session.done(id, result);
            }
            Ask::Cancel {
                exec,
                reason,
                grace_ns,
            } => {
                let (now, last) = (self.now(), self.last_exec);
                let result = match self.find(exec) {
                    Ok(found) => {
                        found.running.state.cancel(reason, grace_ns, now);
                        self.settle(exec);
                        self.flush_links(exec);
                        Ok(())
                    }
                    // It has ended, which is what is wanted.
                    Err(_) if (1..=last).contains(&exec) => Ok(()),
                    Err(refusal) => Err(refusal),
                };
                connection.session.done(id, result);
            }
            Ask::Release { exec } => {
                let result = self.find(exec).and_then(|found| {
                    if !found.ended {
                        let message = format!(
                            "exec {exec} has not ended: cancel it, or wait for it, before it is released"
                        );
                        return Err(Refusal::new(RefusedCode::NotEnded, message));
                    }
                    found.kept = false;
                    Ok(())
                });
                if result.is_ok() {
                    self.settle(exec);
                }
                connection.session.done(id, result);
            }
        }
    }

    fn find(&mut self, number: u64) -> Result<&mut Exec<crate::agent::LeafOf<P>>, Refusal> {
        let last = self.last_exec;
        self.execs.get_mut(&number).ok_or_else(|| {
            let message = match (number, last) {
                (1.., _) if number <= last => {
                    format!("exec {number} has ended and is not kept")
                }
                (_, 0) => format!("there is no exec {number}: there has been none"),
                _ => format!("there is no exec {number}: the last one was {last}"),
            };
            Refusal::new(RefusedCode::UnknownExec, message)
        })
    }

    /// Adds a request to an exec.
    fn link(
        &mut self,
        number: u64,
        read: impl FnOnce(&mut Exec<crate::agent::LeafOf<P>>) -> Result<Option<Reader>, AttachError>,
        link: Link,
    ) -> Result<(), Refusal> {
        let exec = self.find(number)?;
        let reader = read(exec).map_err(|error| match error {
            AttachError::BelowStart { earliest, .. } => refusal(
                RefusedCode::BelowStart,
                format!("exec {number}: {error}"),
                earliest.into(),
            ),
            AttachError::BeyondEnd { .. } => {
                Refusal::new(RefusedCode::Invalid, format!("exec {number}: {error}"))
            }
        })?;
        exec.links.insert(link, reader);
        Ok(())
    }

    /// The execs behind a number, as many as one part of a list has.
    fn page(&self, after: u64) -> ExecsPage {
        let now = self.now();
        let mut behind = self.execs.range(after.saturating_add(1)..);
        if after == u64::MAX {
            return ExecsPage::default();
        }
        let execs = behind
            .by_ref()
            .take(MAX_LISTED)
            .map(|(_, exec)| {
                let mut info = exec.running.info(now);
                info.kept = exec.kept;
                info.clients = u32::try_from(exec.links.len()).unwrap_or(u32::MAX);
                info
            })
            .collect();
        ExecsPage {
            execs,
            more: behind.next().is_some(),
        }
    }

    /// An exec has its record: what its output takes from now on, and whether there is anything to keep.
    pub(crate) fn ended(&mut self, number: u64) {
        let Some(exec) = self.execs.get_mut(&number).filter(|exec| exec.kept) else {
            return;
        };
        let running = &mut exec.running;
        debug_assert_eq!(running.state.state(), ExecState::Ended);
        let cause = running.state.record().map(|record| record.cause.kind());
        if cause == Some(CauseKind::StartFailed) {
            // Its client is told, and knows no number by which to ask for it.
            exec.kept = false;
            return;
        }
        let holds = running.state.seal();
        self.store_bytes = self
            .store_bytes
            .saturating_sub(running.store_bytes)
            .saturating_add(holds);
        running.store_bytes = holds;
    }
}

fn refusal(code: RefusedCode, message: String, numbers: Vec<u64>) -> Refusal {
    Refusal {
        code,
        message,
        numbers,
    }
}

/// The first few of some numbers.
fn listed(numbers: &[u64]) -> String {
    let first: Vec<String> = numbers.iter().take(8).map(ToString::to_string).collect();
    let more = if numbers.len() > first.len() {
        ", ..."
    } else {
        ""
    };
    first.join(", ") + more
}

fn remedy(unreleased: &[u64]) -> String {
    match unreleased {
        [] => String::new(),
        some => format!("; ended and not released: {}", listed(some)),
    }
}
