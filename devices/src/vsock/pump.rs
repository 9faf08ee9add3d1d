//! The work on the queues: packets of the guest to sockets, data of sockets to the guest.
//!
//! Both directions take turns in bounded portions, streams take turns within one, and the loop sees
//! its other events in between: no flood starves anything. Doorbells are off while a queue is being
//! worked on and come on with a second look when it is found empty; the guest is interrupted once a
//! portion, if it wants to be.

use std::os::fd::AsFd;

use rustix::io::Errno;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestMemoryMmap, VolatileSlice};

use super::connection::Connection;
use super::handshake::Refusal;
use super::header::{Header, Op};
use super::host::VsockHost;
use super::io::{self, MAX_SLICES};
use super::muxer::{Key, Verdict};
use super::queues::{QueueError, RxBatch, TxPacket, next_tx, truncate, wants_interrupt};
use super::shared::Active;
use super::stream::{BURST_START, Reading, Stream};

/// Packets of the guest taken in one portion.
const TX_PORTION: usize = 128;
/// Receive buffers filled in one portion.
const RX_PORTION: usize = 256;
/// Portions before the loop looks at its events again.
const ROUNDS: usize = 4;
/// The most that one stream gets before the next has its turn, in bytes.
const MAX_BURST: u32 = 128 * 1024;

/// What has become of one portion.
#[derive(Clone, Copy, Debug)]
struct Portion {
    /// There is more to do at once.
    more: bool,
    /// Buffers were used.
    used: bool,
}

/// What has become of a stream's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// There may be more; this many buffers were used.
    Again(usize),
    /// Nothing left, no credit, or over.
    Done(usize),
    /// The guest has no buffers.
    Starved,
}

/// Packets of the guest in a row that carry data of one connection: one system call takes it all to the host's
/// socket, whose reader would else be woken for each. They are the guest's again when that is done.
#[derive(Debug, Default)]
struct Run<'m> {
    key: Option<Key>,
    slices: Vec<VolatileSlice<'m>>,
    length: usize,
    /// The packets' chains, others that came between included.
    heads: Vec<u16>,
}

impl Run<'_> {
    /// Whether a packet carries more of the same.
    fn goes_on(&self, header: &Header, payload: &[VolatileSlice<'_>]) -> bool {
        let key = Key {
            host_port: header.dst_port,
            guest_port: header.src_port,
        };
        self.key == Some(key)
            && Op::from_wire(header.op) == Some(Op::ReadWrite)
            && self.slices.len() + payload.len() <= MAX_SLICES
            && self.length < MAX_BURST as usize
    }
}

impl VsockHost {
    /// Works on both queues; true if there is more to do at once.
    pub(super) fn pump(&mut self, active: &mut Active) -> Result<bool, QueueError> {
        for _ in 0..ROUNDS {
            let tx = self.pump_tx(active)?;
            let rx = self.pump_rx(active)?;
            let memory = &active.memory;
            // Asked of both, as the question also starts the count for the next time.
            let wanted_tx = tx.used && wants_interrupt(&mut active.tx, memory)?;
            let wanted_rx = rx.used && wants_interrupt(&mut active.rx, memory)?;
            if wanted_tx || wanted_rx {
                active.interrupt.signal_used();
            }
            if !tx.more && !rx.more {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn pump_tx(&mut self, active: &mut Active) -> Result<Portion, QueueError> {
        let Active { memory, tx, .. } = active;
        let mut payload = Vec::new();
        let mut run = Run::default();
        let mut left = TX_PORTION;
        let owed = self.muxer.has_control();
        tx.disable_notification(memory)?;
        while left > 0 {
            let packet = match next_tx(tx, memory, &mut payload) {
                Ok(Some(packet)) => packet,
                Ok(None) => {
                    self.finish(&mut run, tx, memory)?;
                    if tx.enable_notification(memory)? {
                        tx.disable_notification(memory)?;
                        continue;
                    }
                    let used = left < TX_PORTION;
                    return Ok(Portion { more: false, used });
                }
                Err(error) => {
                    // What came before the broken chain has been sent.
                    self.finish(&mut run, tx, memory)?;
                    return Err(error);
                }
            };
            left -= 1;
            self.counters.tx_packets += 1;
            let TxPacket {
                head,
                header,
                payload,
                length,
            } = packet;
            let mut early = false;
            if !header.is_some_and(|header| run.goes_on(&header, payload)) {
                let key = run.key;
                self.finish(&mut run, tx, memory)?;
                early = !owed && self.muxer.has_control() && key.is_some_and(|key| self.flows(key));
            }
            run.heads.push(head);
            match header {
                Some(header) => self.on_packet(&header, payload, length, &mut run),
                None => self.counters.malformed += 1,
            }
            if early {
                // The guest hears of its credit before the rest of its packets is worked on, so that it sends more
                // meanwhile instead of waiting with all of its window used up.
                break;
            }
        }
        self.finish(&mut run, tx, memory)?;
        let (more, used) = (true, true);
        Ok(Portion { more, used })
    }

    /// Whether a host's socket is read as fast as it is written: another window goes into it without the outbox.
    fn flows(&self, key: Key) -> bool {
        self.streams.get(&key).is_some_and(|stream| {
            // The kernel takes twice the window.
            let room = stream.window as usize / 4 * 3;
            io::unread(stream.source.inner().as_fd()) <= room
        })
    }

    /// Delivers a run and gives its buffers back to the guest.
    fn finish(
        &mut self,
        run: &mut Run<'_>,
        tx: &mut Queue,
        memory: &GuestMemoryMmap,
    ) -> Result<(), QueueError> {
        self.deliver(run);
        for head in run.heads.drain(..) {
            tx.add_used(memory, head, 0)?;
        }
        Ok(())
    }

    fn on_packet<'m>(
        &mut self,
        header: &Header,
        payload: &mut Vec<VolatileSlice<'m>>,
        length: usize,
        run: &mut Run<'m>,
    ) {
        let verdict = self.muxer.on_packet(header, length);
        if let Verdict::Data(key, length) = verdict {
            truncate(payload, length as usize);
            run.key = Some(key);
            run.slices.append(payload);
            run.length += length as usize;
            return;
        }
        // Whatever else it means comes after the data before it.
        self.deliver(run);
        match verdict {
            Verdict::Nothing | Verdict::Data(..) => {}
            Verdict::Request(key) => self.on_request(key, header),
            Verdict::Established(key) => self.on_established(key),
            Verdict::Credit(key) => {
                let blocked = |stream: &Stream| stream.reading == Reading::NoCredit;
                if self.streams.get(&key).is_some_and(blocked) {
                    self.make_readable(key);
                }
            }
            Verdict::Ended(key) => self.on_guest_ended(key),
            Verdict::Finished(key) => self.on_finished(key),
            Verdict::Closed(key) => {
                self.closed(key, Refusal::Refused("the guest refused the connection"));
            }
        }
    }

    /// Hands the data of a run to its host.
    fn deliver(&mut self, run: &mut Run<'_>) {
        let Some(key) = run.key.take() else { return };
        let length = std::mem::take(&mut run.length);
        self.counters.tx_bytes += length as u64;
        // A packet that broke a rule has taken the connection with it, but not the data before it.
        let connection = self.muxer.connection(key);
        let receives = connection.is_none_or(Connection::host_receives);
        match self.streams.get_mut(&key) {
            Some(stream) if receives => {
                let socket = stream.source.inner().as_fd();
                match stream.outbox.send(socket, &mut run.slices) {
                    Ok(sent) => {
                        if !stream.outbox.is_empty() {
                            self.touched.push(key);
                        }
                        self.forwarded(key, sent);
                    }
                    Err(_) => {
                        self.forwarded(key, length);
                        self.host_lost(key);
                    }
                }
            }
            // Nobody takes it any more. What was on its way when the guest was told so is lost, and
            // the end of the connection will not pretend otherwise.
            _ => {
                self.forwarded(key, length);
                let lost =
                    |connection: &mut Connection| connection.host_stopped_receiving(length > 0);
                if self.muxer.update(key, lost) == Some(false) {
                    self.reset(key);
                }
            }
        }
        run.slices.clear();
    }

    fn pump_rx(&mut self, active: &mut Active) -> Result<Portion, QueueError> {
        let Active { memory, rx, .. } = active;
        let mut batch = RxBatch::default();
        let mut used = 0;
        rx.disable_notification(memory)?;
        while used < RX_PORTION {
            let starved = if self.muxer.has_control() {
                batch.take(rx, memory, 1)?;
                let starved = batch.is_empty();
                let muxer = &mut self.muxer;
                used += batch.complete(rx, memory, 0, |_| muxer.next_control())?;
                starved
            } else if let Some(key) = self.readable.pop_front() {
                match self.turn(key, rx, memory, &mut batch)? {
                    Turn::Again(buffers) => {
                        used += buffers;
                        self.readable.push_back(key);
                        false
                    }
                    Turn::Done(buffers) => {
                        used += buffers;
                        false
                    }
                    Turn::Starved => {
                        self.readable.push_front(key);
                        true
                    }
                }
            } else {
                return Ok(self.rx_portion(used, false));
            };
            if starved {
                // Only now is a doorbell of this queue of interest.
                if !rx.enable_notification(memory)? {
                    return Ok(self.rx_portion(used, false));
                }
                rx.disable_notification(memory)?;
            }
        }
        Ok(self.rx_portion(used, true))
    }

    fn rx_portion(&mut self, used: usize, more: bool) -> Portion {
        self.counters.rx_packets += used as u64;
        let used = used > 0;
        Portion { more, used }
    }

    /// Gives one stream its turn.
    fn turn<'m>(
        &mut self,
        key: Key,
        rx: &mut Queue,
        memory: &'m GuestMemoryMmap,
        batch: &mut RxBatch<'m>,
    ) -> Result<Turn, QueueError> {
        // Its interest will follow from what is found here.
        self.touched.push(key);
        let (Some(stream), Some(connection)) =
            (self.streams.get_mut(&key), self.muxer.connection(key))
        else {
            return Ok(Turn::Done(0));
        };
        if !connection.reads_host() {
            stream.reading = Reading::Idle;
            return Ok(Turn::Done(0));
        }
        let credit = connection.may_send();
        if credit == 0 {
            stream.reading = Reading::NoCredit;
            self.muxer.update(key, Connection::want_credit);
            return Ok(Turn::Done(0));
        }
        let burst = stream.burst.min(credit) as usize;
        batch.take(rx, memory, burst)?;
        if batch.is_empty() {
            return Ok(Turn::Starved);
        }
        let room = batch.room();
        match io::receive(stream.source.inner().as_fd(), batch.payload()) {
            Ok(0) => {
                stream.reading = Reading::Idle;
                batch.give_back(rx);
                self.on_host_ended(key);
                Ok(Turn::Done(0))
            }
            Ok(length) => {
                let drained = length < room;
                if drained {
                    stream.reading = Reading::Idle;
                    stream.burst = (stream.burst / 2).max(BURST_START);
                } else if room == burst {
                    stream.burst = (stream.burst * 4).min(MAX_BURST);
                }
                self.counters.rx_bytes += length as u64;
                let muxer = &mut self.muxer;
                let used =
                    batch.complete(rx, memory, length, |share| muxer.data_header(key, share))?;
                Ok(if drained {
                    Turn::Done(used)
                } else {
                    Turn::Again(used)
                })
            }
            Err(Errno::AGAIN) => {
                stream.reading = Reading::Idle;
                batch.give_back(rx);
                Ok(Turn::Done(0))
            }
            Err(error) => {
                tracing::debug!(%error, ?key, "host socket failed");
                batch.give_back(rx);
                self.reset(key);
                Ok(Turn::Done(0))
            }
        }
    }
}
