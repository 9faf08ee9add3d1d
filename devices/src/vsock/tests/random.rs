//! Any order of things that a guest and its host can do.

use std::io::Write;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::testing::read;
use crate::vsock::header::SHUTDOWN_SEND;

#[derive(Clone, Debug)]
enum Step {
    /// A client connects and the guest answers, or not.
    Connect { answer: bool },
    /// The guest dials the one server.
    Dial,
    /// Data from the guest, so many bytes.
    Send { which: usize, length: usize },
    /// Data from the host.
    Write { which: usize, length: usize },
    /// The guest ends a direction or both.
    End { which: usize, flags: u32 },
    /// The host closes.
    Close { which: usize },
    /// The host reads what there is.
    Read { which: usize },
    /// The guest posts buffers.
    Post { count: usize },
    /// The guest takes what came and gives credit back.
    Take,
    /// The guest sends any header.
    Noise {
        op: u16,
        port: u32,
        len: u32,
        flags: u32,
    },
    /// Seconds pass.
    Wait { seconds: u64 },
    /// The driver resets the device and starts it again.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let which = || 0..4usize;
    let length = || prop_oneof![0..10usize, 0..5_000usize, Just(65_536), 0..65_536usize];
    prop::collection::vec(
        prop_oneof![
            3 => any::<bool>().prop_map(|answer| Step::Connect { answer }),
            3 => Just(Step::Dial),
            8 => (which(), length()).prop_map(|(which, length)| Step::Send { which, length }),
            8 => (which(), length()).prop_map(|(which, length)| Step::Write { which, length }),
            2 => (which(), 0..4u32).prop_map(|(which, flags)| Step::End { which, flags }),
            2 => which().prop_map(|which| Step::Close { which }),
            4 => which().prop_map(|which| Step::Read { which }),
            4 => (0..40usize).prop_map(|count| Step::Post { count }),
            8 => Just(Step::Take),
            2 => (0..9u16, 0..8u32, 0..70_000u32, 0..4u32)
                .prop_map(|(op, port, len, flags)| Step::Noise { op, port, len, flags }),
            1 => (0..10u64).prop_map(|seconds| Step::Wait { seconds }),
            1 => Just(Step::Restart),
        ],
        0..60,
    )
}

/// What the test knows of one connection.
struct Model {
    header: Header,
    socket: Option<UnixStream>,
    /// What the guest has sent, and of that what the host has read.
    sent: Vec<u8>,
    read: Vec<u8>,
    /// What the host has written, and of that what the guest has received.
    written: Vec<u8>,
    received: Vec<u8>,
    /// Credit that the device has told.
    window: u32,
    forwarded: u32,
    sends: bool,
}

impl Model {
    fn new(header: Header, socket: UnixStream) -> Self {
        Self {
            header: Header {
                buf_alloc: 30_000,
                ..header
            },
            socket: Some(socket),
            sent: Vec::new(),
            read: Vec::new(),
            written: Vec::new(),
            received: Vec::new(),
            window: 0,
            forwarded: 0,
            sends: true,
        }
    }
}

proptest! {
    // A quarter of what PROPTEST_CASES says, as each case is a device of its own.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    /// Each side receives a prefix of what the other has sent, nothing spins, nothing is held
    /// beyond its bound and nothing is left at the end.
    #[test]
    fn any_order_of_events_leaves_prefixes_and_no_trace(steps in steps()) {
        let folder = tempfile::tempdir().unwrap();
        let mut rig = Rig::new(folder.path(), |_| ());
        let server = UnixListener::bind(rig.server_path(5)).unwrap();
        server.set_nonblocking(true).unwrap();
        let mut models: Vec<Model> = Vec::new();
        let mut next_port = 1000;
        let stream = noise(1 << 20);
        for step in steps {
            let count = models.len().max(1);
            match step {
                Step::Connect { answer } => {
                    next_port += 1;
                    let client = rig.client(&format!("CONNECT {next_port}\n"));
                    rig.post(2);
                    rig.run();
                    // What was owed before comes first and may have taken the buffers.
                    let requests = take(&mut rig, &mut models);
                    let request = requests.iter().find(|request| request.dst_port == next_port);
                    let Some(request) = request else { continue };
                    if answer {
                        let header = Rig::header(next_port, request.src_port, Op::Response);
                        let header = Header { buf_alloc: 30_000, ..header };
                        rig.send(header, &[]);
                        rig.run();
                        let mut client = client;
                        let line = format!("OK {}\n", request.src_port);
                        let mut greeting = read(&mut client);
                        let rest = greeting.split_off(line.len());
                        prop_assert_eq!(greeting, line.as_bytes());
                        prop_assert_eq!(rest, b"");
                        models.push(Model::new(header, client));
                    }
                }
                Step::Dial => {
                    next_port += 1;
                    let header = Rig::header(next_port, 5, Op::Request);
                    let header = Header { buf_alloc: 30_000, ..header };
                    rig.send(header, &[]);
                    rig.run();
                    if let Ok((socket, _)) = server.accept() {
                        socket.set_nonblocking(true).unwrap();
                        models.push(Model::new(header, socket));
                    }
                }
                Step::Send { which, length } => {
                    let Some(model) = models.get_mut(which % count) else { continue };
                    let free = model.window.saturating_sub(model.sent.len() as u32 - model.forwarded);
                    let length = length.min(free as usize);
                    if model.sends && length > 0 {
                        let from = model.sent.len();
                        let data = &stream[from..from + length];
                        model.sent.extend_from_slice(data);
                        let header = Header { fwd_cnt: model.received.len() as u32, ..model.header };
                        rig.send_data(header, data);
                    }
                }
                Step::Write { which, length } => {
                    let Some(model) = models.get_mut(which % count) else { continue };
                    if let Some(socket) = &mut model.socket {
                        let from = model.written.len();
                        if let Ok(written) = socket.write(&stream[from..from + length]) {
                            model.written.extend_from_slice(&stream[from..from + written]);
                        }
                    }
                }
                Step::End { which, flags } => {
                    let Some(model) = models.get_mut(which % count) else { continue };
                    model.sends &= flags & SHUTDOWN_SEND == 0;
                    let header = Header { fwd_cnt: model.received.len() as u32, ..model.header };
                    rig.send(with(header, Op::Shutdown, flags), &[]);
                }
                Step::Close { which } => {
                    if let Some(model) = models.get_mut(which % count) {
                        model.socket = None;
                    }
                }
                Step::Read { which } => {
                    if let Some(model) = models.get_mut(which % count) {
                        read_model(model);
                    }
                }
                Step::Post { count } => rig.post(count.min(rig.rx.free())),
                Step::Take => {
                    take(&mut rig, &mut models);
                    for model in &models {
                        let header = Header { fwd_cnt: model.received.len() as u32, ..model.header };
                        rig.send(with(header, Op::CreditUpdate, 0), &[]);
                        rig.run();
                    }
                }
                Step::Noise { op, port, len, flags } => {
                    let header = Header { len, flags, op, ..Rig::header(port, 77, Op::Request) };
                    rig.send(header, &stream[..len as usize]);
                }
                Step::Wait { seconds } => rig.advance(Duration::from_secs(seconds)),
                Step::Restart => {
                    rig.run();
                    models.clear();
                    rig.start();
                }
            }
            rig.run();
            prop_assert_eq!(rig.poller.counters().muted, 0);
            prop_assert_eq!(rig.driver.status() & 64, 0);
            prop_assert!(rig.host.buffered() <= 256 * 1024 * (models.len() + 1).max(1) * 4);
        }
        take(&mut rig, &mut models);
        for model in &mut models {
            read_model(model);
            prop_assert!(model.sent.starts_with(&model.read));
            prop_assert!(model.written.starts_with(&model.received));
        }
        // The guest goes, then the host: nothing is left.
        rig.driver.reset();
        models.clear();
        drop(server);
        rig.advance(Duration::from_secs(60));
        prop_assert_eq!(rig.host.connections(), 0);
        prop_assert_eq!(rig.poller.registered(), 4);
        prop_assert_eq!(rig.host.timeout(rig.now), None);
    }
}

fn read_model(model: &mut Model) {
    if let Some(socket) = &mut model.socket {
        let mut data = Vec::new();
        // A reset shows as an error after the data.
        let _ = std::io::Read::read_to_end(socket, &mut data);
        model.read.extend(data);
    }
}

/// Hands what the guest has received to its connections; the requests in it.
fn take(rig: &mut Rig, models: &mut [Model]) -> Vec<Header> {
    let mut requests = Vec::new();
    for (header, data) in rig.received() {
        if header.op == Op::Request.to_wire() {
            requests.push(header);
        }
        let key = (header.dst_port, header.src_port);
        let model = models
            .iter_mut()
            .find(|model| (model.header.src_port, model.header.dst_port) == key);
        if let Some(model) = model {
            if header.op != Op::Reset.to_wire() {
                model.window = header.buf_alloc;
                model.forwarded = header.fwd_cnt;
            }
            model.received.extend(data);
        }
    }
    requests
}
