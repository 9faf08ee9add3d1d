//! Virtio-vsock (virtio 1.2, section 5.10) with its host side on unix sockets.
//!
//! ```text
//!   vCPU thread                       loop thread                              host
//!   VirtioMmio<Vsock> --activate-->  Shared{queues}  <-- VsockHost             clients: <dir>/vsock.sock
//!                     --reset----->                      | pump (rx, tx)       servers: <dir>/vsock.sock_<port>
//!   ioeventfd ------ Kick ---------------------------->  | muxer, connections  agent's control connection:
//!   irqfd    <------ Interrupt -----------------------<  | clients (CONNECT)     ControlSink
//! ```
//!
//! One idea a file: [`header`], [`credit`], [`connection`], [`muxer`] and [`handshake`] are pure;
//! `queues` turns descriptor chains into slices; `io` and `outbox` move bytes; `clients` speaks the
//! `CONNECT` line; `stream` is the host's end of a connection and `ending` how it ends; `host` and
//! `pump` are the loop that drives them.
//!
//! Data is read from a host socket straight into the guest's receive buffers (many of them by one
//! call) and written from the guest's transmit buffers straight to the socket; only what the socket
//! does not take at once is copied, and that never exceeds the connection's credit window.

mod clients;
pub mod connection;
pub mod credit;
mod ending;
pub mod handshake;
pub mod header;
mod hex;
mod host;
mod io;
pub mod muxer;
mod outbox;
mod pump;
mod queues;
mod shared;
mod stream;

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use vmm_events::Registrar;

use crate::virtio::{ActivateError, Activation, Kick, VirtioDevice};

pub use host::{Counters, VsockHost};
pub use muxer::{Key, Limits};
pub use queues::QueueError;
use shared::{Active, Shared};
pub use stream::socket_window;

/// Index of the queue that carries packets to the guest.
pub const RX_QUEUE: usize = 0;
/// Index of the queue that carries packets of the guest.
pub const TX_QUEUE: usize = 1;
/// Index of the queue that carries events to the guest.
pub const EVENT_QUEUE: usize = 2;

const QUEUE_SIZES: [u16; 3] = [256, 256, 16];

/// Device type 19 (virtio 1.2, section 5.10.1).
const DEVICE_ID: u32 = 19;
/// `VIRTIO_F_INDIRECT_DESC`: one ring entry a packet, so that small packets do not fill the queue.
const FEATURE_INDIRECT: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`: few doorbells and few interrupts.
const FEATURE_EVENT_IDX: u64 = 1 << 29;

/// One life of the sandbox, as its clients have to name it.
#[derive(Clone)]
pub struct Fence {
    /// The generation's counter, known to all.
    pub counter: u64,
    /// Its nonce, known to the monitor and its clients only.
    pub nonce: [u8; 16],
    /// Whether a plain `CONNECT` is refused altogether.
    pub require_generation: bool,
}

/// Without the nonce, which is never shown.
impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence")
            .field("counter", &self.counter)
            .field("require_generation", &self.require_generation)
            .finish_non_exhaustive()
    }
}

/// Who takes the agent's control connection. Called on the loop's thread; must not block.
pub trait ControlSink: Send {
    /// The agent has dialled the control port from a port below 1024: this is the other end,
    /// non-blocking. It is called again only after the connection before has ended.
    fn connected(&mut self, stream: UnixStream);
}

impl<F: FnMut(UnixStream) + Send> ControlSink for F {
    fn connected(&mut self, stream: UnixStream) {
        self(stream);
    }
}

/// How long the loop waits for others.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// For a client's line.
    pub handshake: Duration,
    /// After which a client without a line may be dropped in favour of a new one when all places
    /// are taken.
    pub handshake_grace: Duration,
    /// For the guest's answer to a client's connection.
    pub connect: Duration,
    /// For the guest's answer to the end of a connection (Linux: `VSOCK_CLOSE_TIMEOUT`).
    pub close: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            handshake_grace: Duration::from_secs(1),
            connect: Duration::from_secs(5),
            close: Duration::from_secs(8),
        }
    }
}

/// What a vsock device is made of.
pub struct VsockConfig {
    /// The guest's address: 3 or above.
    pub guest_cid: u64,
    /// Where clients connect; bound at once with mode 0600, removed with the [`VsockHost`]. What
    /// the guest dials goes to this path with `_<port>` appended.
    pub socket: PathBuf,
    /// Ports of the guest's dialling that go elsewhere.
    pub guest_ports: BTreeMap<u32, PathBuf>,
    /// This life.
    pub fence: Fence,
    /// Set once the agent is ready; until then its port answers `ERR NOT_READY`.
    pub agent_ready: Arc<AtomicBool>,
    /// The agent's port in the guest.
    pub agent_port: u32,
    /// The port on the host that the agent dials, which ends in `control`.
    pub control_port: u32,
    /// Who takes that connection; `None` resets it, as with any port that nobody listens on.
    pub control: Option<Box<dyn ControlSink>>,
    /// Bounds.
    pub limits: Limits,
    /// Clients at once that have not sent their line.
    pub half_open: usize,
    /// Waits.
    pub deadlines: Deadlines,
}

impl VsockConfig {
    /// A configuration with default bounds and waits and without a control connection.
    #[must_use]
    pub fn new(socket: PathBuf, fence: Fence) -> Self {
        Self {
            guest_cid: 3,
            socket,
            guest_ports: BTreeMap::new(),
            fence,
            agent_ready: Arc::default(),
            agent_port: 1000,
            control_port: 1001,
            control: None,
            limits: Limits::default(),
            half_open: 256,
            deadlines: Deadlines::default(),
        }
    }
}

impl fmt::Debug for VsockConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockConfig")
            .field("guest_cid", &self.guest_cid)
            .field("socket", &self.socket)
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}

/// Why a vsock device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// No descriptor for a doorbell.
    #[error("cannot create a doorbell")]
    Kick(#[source] std::io::Error),
    /// The socket could not be bound: the path is taken, longer than 107 bytes, or its folder is
    /// missing.
    #[error("cannot bind {}", path.display())]
    Bind {
        /// The socket's path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
    /// A descriptor could not be added to the loop.
    #[error("cannot register with the event loop")]
    Register(#[source] vmm_events::Error),
}

/// What an event of the loop is about; give it to [`VsockHost::dispatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The doorbell of this queue.
    Kick(usize),
    /// The socket that clients connect to.
    Listener,
    /// A client that has not sent its line yet.
    Client(u64),
    /// A connection's socket.
    Stream(Key),
    /// A socket that takes the last bytes of a connection that is over.
    Lingering(u64),
}

/// Makes a vsock device: the registers' side for [`crate::virtio::VirtioMmio`] and the loop's side.
/// `registrar` belongs to the loop that will call [`VsockHost::dispatch`]; its tokens need only be
/// made from [`Token`].
///
/// # Errors
/// [`CreateError`]; nothing is left behind then.
pub fn create<T>(
    config: VsockConfig,
    registrar: Registrar<T>,
) -> Result<(Vsock, VsockHost), CreateError>
where
    T: From<Token> + Clone + Send + 'static,
{
    let kicks: Vec<Kick> = QUEUE_SIZES
        .iter()
        .map(|_| Kick::new().map_err(CreateError::Kick))
        .collect::<Result<_, _>>()?;
    let shared = Arc::new(Shared::default());
    let guest_cid = config.guest_cid;
    let host = VsockHost::new(config, kicks.clone(), Arc::clone(&shared), registrar)?;
    let device = Vsock {
        guest_cid,
        kicks,
        shared,
    };
    Ok((device, host))
}

/// The vsock device as its transport sees it.
#[derive(Debug)]
pub struct Vsock {
    guest_cid: u64,
    kicks: Vec<Kick>,
    shared: Arc<Shared>,
}

impl VirtioDevice for Vsock {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        FEATURE_INDIRECT | FEATURE_EVENT_IDX
    }

    fn kicks(&self) -> &[Kick] {
        &self.kicks
    }

    /// The guest's address, little endian (section 5.10.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = self.guest_cid.to_le_bytes();
        for (index, byte) in data.iter_mut().enumerate() {
            let position = usize::try_from(offset).map(|offset| offset.saturating_add(index));
            if let Some(value) = position.ok().and_then(|position| config.get(position)) {
                *byte = *value;
            }
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut queues = activation.queues.into_iter();
        let mut required = |index| {
            queues
                .next()
                .flatten()
                .ok_or(ActivateError::QueueNotReady { index })
        };
        let (rx, tx) = (required(RX_QUEUE)?, required(TX_QUEUE)?);
        self.shared.start(Active {
            memory: activation.memory,
            rx,
            tx,
            interrupt: activation.interrupt,
        });
        // What the driver put in the queues before DRIVER_OK has rung no bell that counts.
        self.kicks[RX_QUEUE].ring();
        self.kicks[TX_QUEUE].ring();
        Ok(())
    }

    fn reset(&mut self) {
        self.shared.stop();
        // The loop has connections to end.
        self.kicks[RX_QUEUE].ring();
    }
}

#[cfg(test)]
mod tests;

/// True if a test asks for this protection to be left out, to see that its test notices.
#[cfg(feature = "negative-control")]
fn negative_control(case: &str) -> bool {
    std::env::var_os("VMM_NEGATIVE_CONTROL").is_some_and(|removed| removed == case)
}

#[cfg(not(feature = "negative-control"))]
fn negative_control(_: &str) -> bool {
    false
}
