//! `metrics`: the monitor's own counters at once, the agent's when it has told them.

use std::time::Instant;

use serde_json::{Value, json};
use vmm_events::{Inbox, Source};
use vmm_protocol::AgentCounters;

use super::Supervisor;
use crate::api::Asked;
use crate::control::{Counted, Uncounted};

/// Who waits for the agent's counters. All who ask while a question is on its way share its answer.
#[derive(Default)]
pub(super) struct Counting {
    /// Where answers come; `None` without an agent, and once the device loop has gone.
    pub(super) answers: Option<Source<Inbox<Counted>>>,
    /// A question is on its way, be there still a client that wants its answer or not.
    asked: bool,
    clients: Vec<u64>,
}

impl Counting {
    /// One more client wants an answer; whether a question is to be sent. Those that have hung up are forgotten.
    fn join(&mut self, client: u64, is_there: impl Fn(u64) -> bool) -> bool {
        self.clients.retain(|client| is_there(*client));
        self.clients.push(client);
        !std::mem::replace(&mut self.asked, true)
    }

    /// The question has its answer, which is for these.
    fn answered(&mut self) -> Vec<u64> {
        self.asked = false;
        std::mem::take(&mut self.clients)
    }
}

impl Supervisor {
    /// A client wants the counters, with those of the agent if it says so.
    pub(super) fn on_metrics(
        &mut self,
        client: u64,
        with_agent: bool,
        now: Instant,
        asked: &mut Vec<Asked>,
    ) {
        let gone = Uncounted::Gone.to_string();
        let why = match (with_agent, self.guest.has_agent, &self.counting.answers) {
            (false, _, _) => "not asked for",
            (_, false, _) => "the sandbox was started with --no-agent",
            (_, _, None) => &gone,
            (_, _, Some(_)) => {
                let api = &self.api;
                if self.counting.join(client, |client| api.is_there(client)) {
                    self.guest.ask_counters();
                }
                return;
            }
        };
        let result = self.metrics(Err(why));
        self.api.reply(client, &result, now, asked);
    }

    /// The agent has answered, or will not.
    pub(super) fn on_counted(&mut self, now: Instant, asked: &mut Vec<Asked>) {
        let Some(answers) = &self.counting.answers else {
            return;
        };
        let mut turn = answers.inner().turn();
        let counted = turn.next();
        let over = turn.is_over();
        drop(turn);
        if let Some(counted) = counted {
            self.tell_counted(counted, now, asked);
        }
        if over {
            // The device loop has gone, and whatever was asked with it.
            self.counting.answers = None;
            self.tell_counted(Err(Uncounted::Gone), now, asked);
        }
    }

    /// Answers all who wait.
    pub(super) fn tell_counted(&mut self, counted: Counted, now: Instant, asked: &mut Vec<Asked>) {
        let clients = self.counting.answered();
        if clients.is_empty() {
            return;
        }
        let why = counted.map_err(|why| why.to_string());
        let result = self.metrics(why.as_ref().copied().map_err(String::as_str));
        for client in clients {
            self.api.reply(client, &result, now, asked);
        }
    }

    fn metrics(&self, agent: Result<AgentCounters, &str>) -> Value {
        let counters = |counters: vmm_events::Counters| {
            json!({
                "wakeups": counters.wakeups,
                "without_progress": counters.without_progress,
                "stale_events": counters.stale,
                "muted": counters.muted,
            })
        };
        let machine = self.guest.metrics();
        let mut devices = counters(machine.events);
        devices["watched"] = json!(machine.watched);
        let vsock = machine.vsock;
        let mut result = json!({
            "supervisor": counters(self.poller.counters()),
            "devices": devices,
            "vcpus": {"exits": machine.exits},
            "vsock": {
                "connections": machine.connections,
                "buffered": machine.buffered,
                "from_guest": {"packets": vsock.tx_packets, "bytes": vsock.tx_bytes},
                "to_guest": {"packets": vsock.rx_packets, "bytes": vsock.rx_bytes},
                "malformed": vsock.malformed,
                "refusals": vsock.refusals,
            },
        });
        match agent {
            Ok(agent) => {
                result["agent"] = json!({
                    "wakeups": agent.wakeups,
                    "without_progress": agent.without_progress,
                    "stale_events": agent.stale_events,
                    "muted": agent.muted,
                    "sessions": agent.sessions,
                    "execs": agent.execs,
                    "resident_bytes": agent.resident_bytes,
                });
            }
            Err(why) => {
                result["agent"] = Value::Null;
                result["agent_note"] = json!(why);
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_ask_at_once_share_a_question_that_outlives_each_of_them() {
        let mut counting = Counting::default();
        assert!(counting.join(1, |_| true), "the first asks");
        assert!(!counting.join(2, |_| true));
        // All have hung up; the question is on its way all the same.
        assert!(!counting.join(3, |_| false));
        assert_eq!(counting.answered(), [3]);
        assert_eq!(counting.answered(), [] as [u64; 0]);
        assert!(counting.join(4, |_| true), "asked afresh");
    }

    #[test]
    fn clients_that_come_and_go_while_an_answer_is_late_leave_nothing() {
        let mut counting = Counting::default();
        for client in 0..10_000 {
            counting.join(client, |_| false);
        }
        assert_eq!(counting.answered(), [9999]);
    }
}
