use super::*;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::json;
use vmm_events::Poller;

/// A server, its loop, and time that tests set.
struct Rig {
    folder: tempfile::TempDir,
    poller: Poller<Token>,
    server: Server<Token>,
    asked: Vec<Asked>,
    now: Instant,
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let poller = Poller::new().unwrap();
        let server = Server::bind(
            &folder.path().join("control.sock"),
            poller.registrar(),
            |token| token,
        )
        .unwrap();
        Self {
            folder,
            poller,
            server,
            asked: Vec::new(),
            now: Instant::now(),
        }
    }

    fn client(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("control.sock")).unwrap()
    }

    /// Serves all that there is now.
    fn serve(&mut self) {
        loop {
            self.poller.wait(Some(Duration::ZERO)).unwrap();
            let mut quiet = true;
            while let Some(event) = self.poller.next_event() {
                quiet = false;
                let answer =
                    self.server
                        .dispatch(event.token, event.readiness, self.now, &mut self.asked);
                self.poller.answer(&event, answer);
            }
            self.server.tick(self.now);
            if quiet {
                return;
            }
        }
    }

    fn reply(&mut self, asked: Asked) {
        self.server.reply(
            asked.client,
            &json!({"n": asked.client}),
            self.now,
            &mut self.asked,
        );
    }
}

fn line(client: &mut UnixStream) -> Value {
    let mut line = Vec::new();
    let mut byte = [0];
    while client.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    serde_json::from_slice(&line).unwrap()
}

fn code(answer: &Value) -> &str {
    answer["error"]["code"].as_str().unwrap_or("none")
}

#[test]
fn requests_in_pieces_and_in_a_row_are_served_in_order() {
    let mut rig = Rig::new();
    let mut client = rig.client();
    let two = [
        Request::Status.line(),
        Request::Metrics { agent: true }.line(),
    ]
    .concat();
    for byte in &two {
        client.write_all(std::slice::from_ref(byte)).unwrap();
        rig.serve();
    }
    // The second waits for the answer of the first.
    assert_eq!(rig.asked.len(), 1);
    let first = rig.asked.pop().unwrap();
    assert_eq!(first.request, Request::Status);
    rig.reply(first);
    rig.serve();
    let second = rig.asked.pop().unwrap();
    assert_eq!(
        (second.client, second.request),
        (first.client, Request::Metrics { agent: true })
    );
    rig.reply(second);
    for _ in 0..2 {
        assert_eq!(
            line(&mut client),
            json!({"v": 1, "ok": true, "result": {"n": first.client}})
        );
    }
}

#[test]
fn ho03_wrong_and_oversized_requests_are_answered_and_end_the_connection() {
    let mut rig = Rig::new();
    for (request, expected) in [
        (b"nonsense\n".to_vec(), "bad_request"),
        (b"{\"v\":9,\"op\":\"kill\"}\n".to_vec(), "version"),
        (
            b"{\"v\":1,\"op\":\"dance\"}\n".to_vec(),
            "unknown_operation",
        ),
        (vec![b'x'; 3 * MAX_LINE], "too_long"),
    ] {
        let mut client = rig.client();
        client.write_all(&request).unwrap();
        rig.serve();
        assert_eq!(code(&line(&mut client)), expected);
        // Data that was not read makes the end a reset.
        assert!(matches!(client.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
    assert!(rig.asked.is_empty() && rig.server.clients.is_empty());
}

#[test]
fn ho03_truncated_requests_ask_for_nothing() {
    let mut rig = Rig::new();
    let mut client = rig.client();
    client.write_all(b"{\"v\":1,\"op\":\"kill\"}").unwrap();
    rig.serve();
    drop(client);
    rig.serve();
    assert!(rig.asked.is_empty() && rig.server.clients.is_empty());
}

#[test]
fn slow_clients_are_let_go_at_their_deadline_and_waiting_ones_are_not() {
    let mut rig = Rig::new();
    let (mut slow, mut silent, mut waiting) = (rig.client(), rig.client(), rig.client());
    slow.write_all(b"{\"v\":1,").unwrap();
    waiting.write_all(&Request::Wait.line()).unwrap();
    rig.serve();
    let asked = rig.asked.pop().unwrap();
    rig.server.defer(asked.client);
    // More pieces do not put the deadline off.
    rig.now += DEADLINE / 2;
    slow.write_all(b" ").unwrap();
    rig.serve();
    assert_eq!(rig.server.timeout(rig.now), Some(DEADLINE / 2));
    rig.now += DEADLINE / 2;
    rig.serve();
    for client in [&mut slow, &mut silent] {
        assert_eq!(code(&line(client)), "too_slow");
    }
    assert_eq!(
        (rig.server.clients.len(), rig.server.timeout(rig.now)),
        (1, None)
    );
    rig.now += 1000 * DEADLINE;
    rig.serve();
    rig.reply(asked);
    assert_eq!(line(&mut waiting)["ok"], true);
    drop(waiting);
    rig.serve();
    assert!(rig.server.clients.is_empty());
}

#[test]
fn clients_are_bounded_and_those_that_hang_up_while_they_wait_make_room() {
    let mut rig = Rig::new();
    let mut clients: Vec<UnixStream> = (0..MAX_CLIENTS).map(|_| rig.client()).collect();
    for client in &mut clients {
        client.write_all(&Request::Wait.line()).unwrap();
    }
    rig.serve();
    assert_eq!(rig.asked.len(), MAX_CLIENTS);
    let mut refused = rig.client();
    rig.serve();
    assert_eq!(code(&line(&mut refused)), "too_many_clients");
    clients.clear();
    rig.serve();
    assert!(rig.server.clients.is_empty());
    let before = rig.poller.counters().wakeups;
    rig.serve();
    assert_eq!(
        rig.poller.counters().wakeups,
        before + 1,
        "nothing is left that wakes"
    );
}

#[test]
fn answers_nobody_reads_are_bounded_by_their_deadline() {
    let mut rig = Rig::new();
    let mut client = rig.client();
    client.write_all(&Request::Status.line()).unwrap();
    rig.serve();
    let asked = rig.asked.pop().unwrap();
    let large = json!("x".repeat(1 << 20));
    rig.server
        .reply(asked.client, &large, rig.now, &mut rig.asked);
    rig.serve();
    assert_eq!(rig.server.clients.len(), 1);
    rig.now += DEADLINE;
    rig.serve();
    assert!(rig.server.clients.is_empty());
    drop(client);
}
