//! One connection's state machine. Pure: no I/O, no clock.
//!
//! ```text
//!  host asks:  REQUEST ->        Requested -- RESPONSE --> Open
//!  guest asks: REQUEST <- (host's socket connects) ------> Open, RESPONSE ->
//!
//!  Open has two directions, each of which ends once and for good:
//!    guest_sends    ends by SHUTDOWN(SEND) from the guest      -> host socket: no more writes, once flushed
//!    guest_receives ends by SHUTDOWN(RECEIVE) from the guest   -> host socket: no more reads
//!    host_sends     ends by end of file on the host's socket   -> SHUTDOWN(SEND) to the guest, after the data
//!    host_receives  ends when the host's socket takes no more  -> SHUTDOWN(RECEIVE) to the guest
//!  guest done both ways: RST at once (what is still buffered for the host is flushed without the guest).
//!  host done both ways:  SHUTDOWN(both), the guest has until a deadline to answer RST, then it gets ours.
//!  data that could not be delivered to the host: RST in place of the last SHUTDOWN.
//! ```
//!
//! Virtio 1.2, sections 5.10.6.3 (credit) and 5.10.6.5 (connecting, data, shutdown, reset).

use super::credit::{Credit, CreditError};
use super::header::{Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Who asked for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A client on the host, by the `CONNECT` line; its port is ours to give and to take back.
    Host,
    /// The guest.
    Guest,
}

/// The guest broke a rule; the connection is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Flow control.
    #[error("credit rule broken")]
    Credit(#[from] CreditError),
    /// An operation that this state does not have, by its number.
    #[error("operation {0} out of place")]
    Operation(u16),
    /// Data after the guest had said that it sends no more.
    #[error("data after the end")]
    AfterEnd,
    /// A length beyond the packet's own payload or the protocol's maximum, in bytes.
    #[error("packet claims {0} bytes")]
    Length(u32),
}

/// What a packet of the guest means for the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The guest has accepted.
    Established,
    /// Data for the host: this many bytes of payload, which fit our window.
    Data(u32),
    /// The guest may have more room now.
    Credit,
    /// A direction has ended: see [`Connection::guest_sends`] and [`Connection::guest_receives`].
    Ended,
    /// The guest is done with both; RST is owed to it and the connection is over.
    Finished,
    /// The guest has reset it: over, and no answer.
    Reset,
}

/// State of one connection.
#[derive(Clone, Debug)]
pub struct Connection {
    origin: Origin,
    open: bool,
    credit: Credit,
    guest_sends: bool,
    guest_receives: bool,
    host_sends: bool,
    host_receives: bool,
    lost_data: bool,
    credit_requested: bool,
    owed: Owed,
}

/// Packets owed to the guest, besides data: flags, so that no guest can make them pile up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owed {
    request: bool,
    response: bool,
    credit_update: bool,
    credit_request: bool,
    shutdown: bool,
}

impl Connection {
    /// A connection that a client on the host asks for: REQUEST is owed.
    #[must_use]
    pub fn requested(window: u32) -> Self {
        let mut connection = Self::new(Origin::Host, window);
        connection.owed.request = true;
        connection
    }

    /// A connection that the guest has asked for and that the host's socket has taken: RESPONSE is
    /// owed.
    ///
    /// # Errors
    /// [`Violation::Credit`] for credit fields that make no sense.
    pub fn accepted(window: u32, request: &Header) -> Result<Self, Violation> {
        let mut connection = Self::new(Origin::Guest, window);
        connection.open = true;
        connection
            .credit
            .heard(request.buf_alloc, request.fwd_cnt)?;
        connection.owed.response = true;
        Ok(connection)
    }

    fn new(origin: Origin, window: u32) -> Self {
        Self {
            origin,
            open: false,
            credit: Credit::new(window),
            guest_sends: true,
            guest_receives: true,
            host_sends: true,
            host_receives: true,
            lost_data: false,
            credit_requested: false,
            owed: Owed::default(),
        }
    }

    /// Who asked for it.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Our window: what the guest may send beyond what was forwarded, in bytes.
    #[must_use]
    pub fn window(&self) -> u32 {
        self.credit.window()
    }

    /// False while the guest has not answered our REQUEST.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// False once the guest has said that it sends no more.
    #[must_use]
    pub fn guest_sends(&self) -> bool {
        self.guest_sends
    }

    /// False once the guest has said that it receives no more.
    #[must_use]
    pub fn guest_receives(&self) -> bool {
        self.guest_receives
    }

    /// False once the host's socket takes no more: data of the guest is dropped and counted as
    /// forwarded.
    #[must_use]
    pub fn host_receives(&self) -> bool {
        self.host_receives
    }

    /// True once the host's side is over; the guest still has to answer.
    #[must_use]
    pub fn host_done(&self) -> bool {
        !self.host_sends && !self.host_receives
    }

    /// How many bytes may be read from the host's socket for the guest now. Zero with credit used
    /// up or with the direction over.
    #[must_use]
    pub fn may_send(&self) -> u32 {
        if self.open && self.host_sends && self.guest_receives {
            self.credit.free()
        } else {
            0
        }
    }

    /// True while data can flow from the host to the guest, credit or not.
    #[must_use]
    pub fn reads_host(&self) -> bool {
        self.open && self.host_sends && self.guest_receives
    }

    /// Takes a packet of the guest whose `payload` bytes are really there.
    ///
    /// # Errors
    /// A [`Violation`]; the connection must be reset.
    pub fn on_packet(&mut self, header: &Header, payload: usize) -> Result<Effect, Violation> {
        let op = Op::from_wire(header.op).ok_or(Violation::Operation(header.op))?;
        if op == Op::Reset {
            return Ok(Effect::Reset);
        }
        self.credit.heard(header.buf_alloc, header.fwd_cnt)?;
        if self.credit.free() > 0 {
            self.credit_requested = false;
        }
        match (op, self.open) {
            (Op::Response, false) => {
                self.open = true;
                Ok(Effect::Established)
            }
            (Op::ReadWrite, true) => self.on_data(header.len, payload),
            (Op::CreditUpdate, true) => Ok(Effect::Credit),
            (Op::CreditRequest, true) => {
                self.owed.credit_update = true;
                Ok(Effect::Credit)
            }
            (Op::Shutdown, true) => Ok(self.on_shutdown(header.flags)),
            _ => Err(Violation::Operation(header.op)),
        }
    }

    fn on_data(&mut self, length: u32, payload: usize) -> Result<Effect, Violation> {
        if length > super::header::MAX_PAYLOAD || length as usize > payload {
            return Err(Violation::Length(length));
        }
        if !self.guest_sends {
            return Err(Violation::AfterEnd);
        }
        self.credit.received(length)?;
        Ok(Effect::Data(length))
    }

    fn on_shutdown(&mut self, flags: u32) -> Effect {
        // Permanent: bits that a later packet leaves out stay (section 5.10.6.5).
        self.guest_receives &= flags & SHUTDOWN_RECEIVE == 0;
        self.guest_sends &= flags & SHUTDOWN_SEND == 0;
        if self.guest_sends || self.guest_receives {
            Effect::Ended
        } else {
            Effect::Finished
        }
    }

    /// The host's socket has given these bytes, which are in the guest's buffers now. The header of
    /// the packet comes from [`Connection::stamp`].
    pub fn sent(&mut self, length: u32) {
        self.credit.sent(length);
    }

    /// The guest's bytes have left our buffer: written to the host's socket, or dropped as nobody
    /// wants them.
    pub fn forwarded(&mut self, length: u32) {
        // No update for a guest that will send nothing more.
        self.owed.credit_update |= self.credit.forwarded(length) && self.guest_sends;
    }

    /// There is data for the guest and no credit: ask once.
    pub fn want_credit(&mut self) {
        if !self.credit_requested {
            self.credit_requested = true;
            self.owed.credit_request = true;
        }
    }

    /// End of file on the host's socket: all its data is in the guest's buffers. False if the
    /// connection must be reset, as data of the guest was lost.
    #[must_use]
    pub fn host_ended(&mut self) -> bool {
        self.owed.shutdown |= self.host_sends;
        self.host_sends = false;
        !(self.lost_data && self.host_done())
    }

    /// The host's socket takes no more data. `lost` if the guest had sent some that it never took.
    /// False if the connection must be reset.
    #[must_use]
    pub fn host_stopped_receiving(&mut self, lost: bool) -> bool {
        self.owed.shutdown |= self.host_receives;
        self.host_receives = false;
        self.lost_data |= lost;
        !(self.lost_data && self.host_done())
    }

    /// What the guest has sent and the host's socket has not taken yet, in bytes.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.credit.held()
    }

    /// True if [`Connection::next_control`] has something.
    #[must_use]
    pub fn owes(&self) -> bool {
        self.owed != Owed::default()
    }

    /// The next packet without data that is owed to the guest: operation and flags, in the order in
    /// which it must see them.
    pub fn next_control(&mut self) -> Option<(Op, u32)> {
        let owed = &mut self.owed;
        if std::mem::take(&mut owed.request) {
            Some((Op::Request, 0))
        } else if std::mem::take(&mut owed.response) {
            Some((Op::Response, 0))
        } else if std::mem::take(&mut owed.credit_update) {
            Some((Op::CreditUpdate, 0))
        } else if std::mem::take(&mut owed.credit_request) {
            Some((Op::CreditRequest, 0))
        } else if std::mem::take(&mut owed.shutdown) {
            let receive = if self.host_receives {
                0
            } else {
                SHUTDOWN_RECEIVE
            };
            let send = if self.host_sends { 0 } else { SHUTDOWN_SEND };
            Some((Op::Shutdown, receive | send))
        } else {
            None
        }
    }

    /// Our credit fields for a packet that goes to the guest now; an update that was owed is
    /// thereby paid.
    pub fn stamp(&mut self) -> (u32, u32) {
        self.owed.credit_update = false;
        self.credit.tell()
    }
}
