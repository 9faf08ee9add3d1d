//! A vsock device with its loop and a guest that does what the test says.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_events::{Counters as LoopCounters, Poller};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Driver, DriverQueue, Part};
use crate::virtio::{VirtioDevice, VirtioMmio};
use crate::vsock::header::{HEADER_LEN, HOST_CID, Header, Op, TYPE_STREAM};
use crate::vsock::{self, Fence, Token, Vsock, VsockConfig, VsockHost};

/// Size of a receive buffer that [`Rig::post`] makes available, in bytes, the header included: as
/// in Linux.
pub const RX_BUFFER: u32 = 4096;

const MEMORY: u64 = 32 << 20;
const QUEUE_SIZE: u16 = 256;
const RX_AREA: u64 = 4 << 20;
const TX_AREA: u64 = 8 << 20;
/// Room for one packet of the guest: a header, 64 KiB and some.
const TX_SLOT: u64 = 0x1_1000;
const GUEST_CID: u64 = 3;
const FEATURES: u64 = 1 << 32 | 1 << 29 | 1 << 28;

/// A packet that the guest has received.
pub type Packet = (Header, Vec<u8>);

/// A vsock device, running, in the hands of a test.
#[derive(Debug)]
pub struct Rig {
    /// Guest memory.
    pub memory: GuestMemoryMmap,
    /// The device's registers.
    pub driver: Driver<VirtioMmio<Vsock>>,
    /// The loop's side.
    pub host: VsockHost,
    /// The loop.
    pub poller: Poller<Token>,
    /// Packets to the guest.
    pub rx: DriverQueue,
    /// Packets of the guest.
    pub tx: DriverQueue,
    /// The interrupt line.
    pub line: EventFd,
    /// The time that the device sees.
    pub now: Instant,
    socket: PathBuf,
    rx_buffers: HashMap<u16, (u64, u32)>,
    rx_next: u64,
    tx_next: u64,
}

impl Rig {
    /// A device whose sockets live in `folder`, with its driver up. Nothing is posted to its
    /// queues.
    pub fn new(folder: &Path, configure: impl FnOnce(&mut VsockConfig)) -> Self {
        let mut rig = Self::asleep(folder, configure);
        rig.start();
        rig
    }

    /// The same without a driver.
    pub fn asleep(folder: &Path, configure: impl FnOnce(&mut VsockConfig)) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap();
        let fence = Fence {
            counter: 7,
            nonce: std::array::from_fn(|index| index as u8),
            require_generation: false,
        };
        let socket = folder.join("vsock.sock");
        let mut config = VsockConfig::new(socket.clone(), fence);
        configure(&mut config);
        let poller = Poller::new().unwrap();
        let (device, host) = vsock::create(config, poller.registrar()).unwrap();
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let registers = VirtioMmio::new(device, memory.clone(), line.try_clone().unwrap());
        Self {
            rx: DriverQueue::new(&memory, 0x1_0000, QUEUE_SIZE, true),
            tx: DriverQueue::new(&memory, 0x2_0000, QUEUE_SIZE, true),
            memory,
            driver: Driver(registers),
            host,
            poller,
            line,
            now: Instant::now(),
            socket,
            rx_buffers: HashMap::new(),
            rx_next: RX_AREA,
            tx_next: TX_AREA,
        }
    }

    /// Resets the device and sets it up again with empty queues.
    pub fn start(&mut self) {
        self.rx = DriverQueue::new(&self.memory, 0x1_0000, QUEUE_SIZE, true);
        self.tx = DriverQueue::new(&self.memory, 0x2_0000, QUEUE_SIZE, true);
        self.rx_buffers.clear();
        assert_eq!(self.driver.negotiate(FEATURES), 11);
        self.driver.set_up(0, &self.rx);
        self.driver.set_up(1, &self.tx);
        assert_eq!(self.driver.add_status(4), 15);
    }

    // The loop.

    /// One round of the loop that does not sleep. False if nothing happened.
    pub fn round(&mut self) -> bool {
        let due = self.host.timeout(self.now) == Some(Duration::ZERO);
        self.round_within(Duration::ZERO) || due
    }

    /// One round of the loop that sleeps at most this long. False if it brought no event.
    pub fn round_within(&mut self, limit: Duration) -> bool {
        let timeout = self.host.timeout(self.now).unwrap_or(limit).min(limit);
        self.poller.wait(Some(timeout)).unwrap();
        let mut happened = false;
        while let Some(event) = self.poller.next_event() {
            happened = true;
            let answer = self.host.dispatch(event.token, event.readiness, self.now);
            self.poller.answer(&event, answer);
        }
        self.host.settle(self.now);
        happened
    }

    /// Rounds until nothing happens any more.
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.round() {
                return;
            }
        }
        panic!("the loop spins");
    }

    /// Lets time pass.
    pub fn advance(&mut self, duration: Duration) {
        self.now += duration;
        self.run();
    }

    /// Wake-ups of the loop while real time passes, with nothing done by the test.
    pub fn wakeups_in(&mut self, duration: Duration) -> u64 {
        let end = Instant::now() + duration;
        let before: LoopCounters = self.poller.counters();
        let mut timeouts = 0;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            // The wait that ends by its own timeout is the test's, not the device's.
            timeouts += u64::from(!self.round_within(left));
        }
        self.poller.counters().wakeups - before.wakeups - timeouts.min(1)
    }

    /// Rings a queue's doorbell if the device wants it.
    pub fn kick(&mut self, queue: u32) {
        let needed = match queue {
            0 => self.rx.needs_kick(),
            _ => self.tx.needs_kick(),
        };
        if needed {
            self.driver.write(0x50, queue);
        }
    }

    // The guest.

    /// Makes receive buffers available.
    pub fn post(&mut self, count: usize) {
        for _ in 0..count {
            self.post_buffer(RX_BUFFER);
        }
        self.kick(0);
    }

    /// Makes a receive buffer of this size available, without a doorbell.
    pub fn post_buffer(&mut self, length: u32) {
        let address = self.rx_next;
        self.rx_next += u64::from(length.next_multiple_of(64));
        if self.rx_next > TX_AREA - (1 << 20) {
            self.rx_next = RX_AREA;
        }
        let writable = true;
        let head = self.rx.add(&[Part {
            address,
            length,
            writable,
        }]);
        self.rx_buffers.insert(head, (address, length));
    }

    /// Takes the packets that were received; their buffers are not posted again.
    pub fn received(&mut self) -> Vec<Packet> {
        let mut packets = Vec::new();
        while let Some((head, length)) = self.rx.next_used() {
            let (address, room) = self.rx_buffers.remove(&head).unwrap();
            assert!(length as usize >= HEADER_LEN && length <= room);
            let mut data = vec![0; length as usize];
            self.memory
                .read_slice(&mut data, GuestAddress(address))
                .unwrap();
            let header = Header::from_bytes(data[..HEADER_LEN].try_into().unwrap());
            assert_eq!(header.len as usize, data.len() - HEADER_LEN);
            assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, GUEST_CID));
            packets.push((header, data[HEADER_LEN..].to_vec()));
        }
        self.rx.enable_interrupts();
        packets
    }

    /// Posts buffers, runs, and takes what comes: the operations and their headers and data.
    pub fn exchange(&mut self) -> Vec<(Op, Header, Vec<u8>)> {
        let missing = 64usize.saturating_sub(self.rx_buffers.len());
        self.post(missing);
        self.run();
        let packets = self.received();
        packets
            .into_iter()
            .map(|(header, data)| (Op::from_wire(header.op).unwrap(), header, data))
            .collect()
    }

    /// The header of a packet from the guest, with plenty of credit for the host.
    pub fn header(guest_port: u32, host_port: u32, op: Op) -> Header {
        Header {
            src_cid: GUEST_CID,
            dst_cid: HOST_CID,
            src_port: guest_port,
            dst_port: host_port,
            kind: TYPE_STREAM,
            op: op.to_wire(),
            buf_alloc: 1 << 20,
            ..Header::default()
        }
    }

    /// Sends a packet as header and payload descriptors; its length field is as the test says.
    pub fn send(&mut self, header: Header, payload: &[u8]) {
        self.send_split(header, payload, &[HEADER_LEN]);
    }

    /// Sends a packet over descriptors that end at the given offsets and at its end.
    pub fn send_split(&mut self, header: Header, payload: &[u8], splits: &[usize]) {
        let parts = self.write_packet(&header, payload, splits);
        self.tx.add(&parts);
        self.kick(1);
    }

    /// The same by an indirect table.
    pub fn send_indirect(&mut self, header: Header, payload: &[u8], splits: &[usize]) {
        let parts = self.write_packet(&header, payload, splits);
        self.tx.add_indirect(TX_AREA - (1 << 16), &parts);
        self.kick(1);
    }

    /// Data from the guest.
    pub fn send_data(&mut self, header: Header, payload: &[u8]) {
        let op = Op::ReadWrite.to_wire();
        let len = payload.len() as u32;
        self.send(Header { op, len, ..header }, payload);
    }

    fn write_packet(&mut self, header: &Header, payload: &[u8], splits: &[usize]) -> Vec<Part> {
        // Buffers that were used can be taken again.
        while self.tx.next_used().is_some() {}
        self.tx.enable_interrupts();
        let address = self.tx_next;
        self.tx_next += TX_SLOT;
        if self.tx_next + TX_SLOT > MEMORY {
            self.tx_next = TX_AREA;
        }
        let bytes = [&header.to_bytes(), payload].concat();
        self.memory
            .write_slice(&bytes, GuestAddress(address))
            .unwrap();
        let mut parts = Vec::new();
        let mut start = 0;
        let ends = splits.iter().copied().filter(|end| *end < bytes.len());
        for end in ends.chain([bytes.len()]) {
            parts.push(Part {
                address: address + start as u64,
                length: (end - start) as u32,
                writable: false,
            });
            start = end;
        }
        parts
    }

    // The host.

    /// Where clients connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where the guest's connections to `port` go.
    pub fn server_path(&self, port: u32) -> PathBuf {
        PathBuf::from(format!("{}_{port}", self.socket.display()))
    }

    /// A client that has sent this line.
    pub fn client(&self, line: &str) -> UnixStream {
        let mut client = UnixStream::connect(&self.socket).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        client.set_nonblocking(true).unwrap();
        client
    }

    /// A client whose connection to the guest's `port` is up, and the port that it was given.
    pub fn connected(&mut self, port: u32) -> (UnixStream, u32) {
        let mut client = self.client(&format!("CONNECT {port}\n"));
        let packets = self.exchange();
        let [(Op::Request, request, _)] = &packets[..] else {
            panic!("not a request: {packets:?}");
        };
        let host_port = request.src_port;
        self.send(Self::header(port, host_port, Op::Response), &[]);
        self.run();
        assert_eq!(read(&mut client), format!("OK {host_port}\n").as_bytes());
        (client, host_port)
    }

    /// The device itself.
    pub fn device(&self) -> &impl VirtioDevice {
        self.driver.0.device()
    }
}

/// Reads what is there now from a non-blocking socket. A reset shows after the data and ends it
/// too.
pub fn read(socket: &mut UnixStream) -> Vec<u8> {
    let mut data = Vec::new();
    match socket.read_to_end(&mut data) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
    }
    data
}
