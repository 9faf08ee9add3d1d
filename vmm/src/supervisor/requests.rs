//! What the control socket asks of a life, and the answers.

use std::time::Instant;

use serde_json::{Value, json};

use super::{Done, Error, Phase, Supervisor};
use crate::api::{Asked, Request};
use crate::control::Uncounted;
use crate::sandbox::{Life, Record};

impl Supervisor {
    pub(super) fn on_request(
        &mut self,
        Asked { client, request }: Asked,
        life: &Life,
        now: Instant,
        asked: &mut Vec<Asked>,
    ) -> Result<Option<Done>, Error> {
        match request {
            Request::Status => {
                let result = self.status(life);
                self.api.reply(client, &result, now, asked);
            }
            Request::Metrics { agent } => self.on_metrics(client, agent, now, asked),
            Request::Stop { grace } => {
                self.stop(life, grace)?;
                self.api.reply(client, &json!({}), now, asked);
            }
            Request::Kill => {
                self.api.reply(client, &json!({}), now, asked);
                return Ok(Some(self.killed("it was killed")));
            }
            Request::Wait => {
                self.api.defer(client);
                let api = &self.api;
                self.waiting.retain(|client| api.is_there(*client));
                self.waiting.push(client);
            }
        }
        Ok(None)
    }

    fn status(&self, life: &Life) -> Value {
        let state = match &self.phase {
            Phase::Booting => "starting",
            Phase::Up | Phase::Running(_) => "ready",
            Phase::Stopping(_) => "stopping",
        };
        let heard = self.guest.metrics().heard;
        json!({
            "name": life.sandbox().name().as_str(),
            "state": state,
            "generation": life.id().to_string(),
            "pid": std::process::id(),
            "up_ms": u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            "guest_quiet_ms": heard.map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)),
        })
    }

    pub(super) fn tell_waiting(&mut self, record: &Record) {
        // Their question has gone with the machine.
        self.tell_counted(Err(Uncounted::Gone), Instant::now(), &mut Vec::new());
        let result = json!({
            "end": record.end.name(), "reason": record.reason, "status": record.status, "exit": record.exit,
        });
        for client in std::mem::take(&mut self.waiting) {
            self.api
                .reply(client, &result, Instant::now(), &mut Vec::new());
        }
    }
}
