//! The one thread that moves data: it sleeps until a doorbell, a socket, a deadline or the machine's end.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvm_ioctls::{IoEventAddress, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_devices::virtio::{NOTIFY_OFFSET, VirtioDevice, VirtioMmio};
use vmm_devices::vsock::{self, VsockConfig, VsockHost};
use vmm_events::{Answer, Interest, Poller, Source, Waker};
use vmm_protocol::limits::{AGENT_PORT, CONTROL_PORT};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::bus::SharedDevice;
use crate::control::{Control, Slot};
use crate::exits::{ExitReason, Metrics, Outcome, lock};
use crate::kvm::call;
use crate::layout::{virtio_gsi, virtio_mmio};
use crate::machine::{Error, Vsock};

/// Place of the vsock device among the virtio-mmio devices.
const VSOCK: usize = 0;

/// Whom an event is for.
#[derive(Clone, Copy)]
enum Token {
    /// The machine has ended.
    End,
    /// The owner asks for something.
    Bell,
    Vsock(vsock::Token),
    Control,
}

impl From<vsock::Token> for Token {
    fn from(token: vsock::Token) -> Self {
        Self::Vsock(token)
    }
}

pub(crate) struct DeviceLoop {
    poller: Poller<Token>,
    vsock: Option<VsockHost>,
    control: Option<(Control, Slot)>,
    _wakers: [Source<Waker>; 2],
}

impl DeviceLoop {
    /// A loop that the machine's end ends.
    pub(crate) fn new(outcome: &Outcome) -> Result<Self, Error> {
        let poller = Poller::new()?;
        let end = poller.register(outcome.waker().clone(), Interest::READ, Token::End)?;
        let bell = poller.register(outcome.bell().clone(), Interest::READ, Token::Bell)?;
        Ok(Self {
            poller,
            vsock: None,
            control: None,
            _wakers: [end, bell],
        })
    }

    /// Makes the vsock device: its registers, for the bus, with doorbells and interrupt wired through KVM.
    pub(crate) fn add_vsock(
        &mut self,
        config: Vsock,
        vm: &VmFd,
        memory: &GuestMemoryMmap,
    ) -> Result<SharedDevice, Error> {
        let ready = Arc::new(AtomicBool::new(false));
        let mut device = VsockConfig::new(config.socket, config.fence);
        device.guest_ports = config.host_ports;
        device.limits.large_window = vsock::socket_window();
        device.agent_ready = ready.clone();
        device.agent_port = AGENT_PORT;
        device.control_port = CONTROL_PORT;
        if let Some((identity, notices)) = config.agent {
            let slot = Slot::default();
            let accepted = slot.clone();
            device.control = Some(Box::new(move |stream| *lock(&accepted) = Some(stream)));
            self.control = Some((Control::new(identity, notices, ready), slot));
        }
        let (device, host) = vsock::create(device, self.poller.registrar())?;
        for (queue, kick) in device.kicks().iter().enumerate() {
            // The datamatch is 32 bits wide: the driver writes the queue's index there.
            let address = IoEventAddress::Mmio(virtio_mmio(VSOCK) + NOTIFY_OFFSET);
            vm.register_ioevent(kick.event(), &address, queue as u32)
                .map_err(call("KVM_IOEVENTFD"))?;
        }
        let line = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(Error::Descriptor)?;
        vm.register_irqfd(&line, virtio_gsi(VSOCK))
            .map_err(call("KVM_IRQFD"))?;
        self.vsock = Some(host);
        Ok(Arc::new(Mutex::new(VirtioMmio::new(
            device,
            memory.clone(),
            line,
        ))))
    }

    fn metrics(&self) -> Metrics {
        let vsock = self.vsock.as_ref();
        Metrics {
            events: self.poller.counters(),
            vsock: vsock.map(VsockHost::counters).unwrap_or_default(),
            connections: vsock.map_or(0, VsockHost::connections),
            buffered: vsock.map_or(0, VsockHost::buffered),
            watched: self.poller.registered(),
            ..Metrics::default()
        }
    }

    fn on_bell(&mut self, outcome: &Outcome, now: Instant) {
        let (power_off, counters) = outcome.take_asked();
        let Some((control, _)) = &mut self.control else {
            return;
        };
        if let Some(grace) = power_off {
            control.power_off(grace, now);
        }
        if counters {
            control.ask_counters(now);
        }
    }

    /// Serves the devices until the machine ends.
    pub(crate) fn run(&mut self, outcome: &Outcome) -> Result<ExitReason, Error> {
        loop {
            let now = Instant::now();
            let vsock = self.vsock.as_ref().and_then(|vsock| vsock.timeout(now));
            let control = self
                .control
                .as_ref()
                .and_then(|(control, _)| control.timeout(now));
            let timeout = [vsock, control].into_iter().flatten().min();
            outcome.publish(self.metrics(), now);
            self.poller.wait(timeout)?;
            let now = Instant::now();
            while let Some(event) = self.poller.next_event() {
                let answer = match event.token {
                    Token::End => match outcome.reason() {
                        Some(reason) => return Ok(reason),
                        None => Answer::Unhandled,
                    },
                    Token::Bell => {
                        self.on_bell(outcome, now);
                        Answer::Handled
                    }
                    Token::Vsock(token) => self.vsock.as_mut().map_or(Answer::Unhandled, |vsock| {
                        vsock.dispatch(token, event.readiness, now)
                    }),
                    Token::Control => self
                        .control
                        .as_mut()
                        .map_or(Answer::Unhandled, |(control, _)| {
                            control.dispatch(event.readiness, now)
                        }),
                };
                self.poller.answer(&event, answer);
            }
            if let Some(vsock) = &mut self.vsock {
                vsock.settle(now);
            }
            if let Some((control, slot)) = &mut self.control {
                control.tick(now);
                control.accept(slot, &self.poller, Token::Control);
            }
        }
    }
}
