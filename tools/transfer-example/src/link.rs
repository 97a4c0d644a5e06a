//! The link between the processes: a socket that keeps the boundaries of packets. A message is one
//! packet. Each of its parts follows its length.

use baton::wire::{Multipart, message::Message};
use rustix::net::{self, RecvFlags, SendFlags, sockopt};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const PACKET_MAX: usize = 64 * 1024;
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(3));

pub struct Link {
    socket: OwnedFd,
    /// The other process is gone.
    pub has_ended: bool,
}

impl Link {
    /// A link, and its other end for another process.
    pub fn pair() -> io::Result<(Link, OwnedFd)> {
        let (kind, flags) = (net::SocketType::SEQPACKET, net::SocketFlags::CLOEXEC);
        let (socket, other) = net::socketpair(net::AddressFamily::UNIX, kind, flags, None)?;
        Ok((Link { socket, has_ended: false }, other))
    }

    pub fn from_stdin() -> io::Result<Link> {
        Ok(Link { socket: io::stdin().as_fd().try_clone_to_owned()?, has_ended: false })
    }

    /// Sends the descriptors of this side's shared memory, and waits for those of the other side.
    pub fn exchange<const N: usize>(&self, ours: &[BorrowedFd<'_>]) -> io::Result<[OwnedFd; N]> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(crate::DEADLINE))?;
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = net::SendAncillaryBuffer::new(&mut space);
        control.push(net::SendAncillaryMessage::ScmRights(ours));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        net::sendmsg(&self.socket, &[IoSlice::new(b"x")], &mut control, flags)?;
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = net::RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        net::recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let theirs = control.drain().find_map(|message| match message {
            net::RecvAncillaryMessage::ScmRights(passed) => {
                passed.collect::<Vec<_>>().try_into().ok()
            }
            _ => None,
        });
        theirs.ok_or(io::Error::other("the other side sent other descriptors"))
    }

    /// Sends without waiting. The socket's buffer holds more than both engines send, so a full
    /// buffer counts as a lost link.
    pub fn send(&mut self, message: &Message<'_>) {
        let (mut encoded, mut packet) = (Multipart::new(), Vec::new());
        message.encode(None, &mut encoded);
        for part in encoded.parts().iter() {
            packet.extend((part.len() as u32).to_le_bytes());
            packet.extend(part);
        }
        let sent = net::send(&self.socket, &packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.has_ended |= sent.is_err();
    }

    /// The parts of the next message that has arrived.
    pub fn receive(&mut self) -> Option<Multipart> {
        let mut packet = vec![0; PACKET_MAX];
        let read = net::recv(&self.socket, &mut packet[..], RecvFlags::DONTWAIT);
        if read == Err(rustix::io::Errno::WOULDBLOCK) {
            return None;
        }
        let (mut message, mut left) = (Multipart::new(), &packet[..read.map_or(0, |read| read.0)]);
        self.has_ended |= left.is_empty();
        while let Some((length, rest)) = left.split_first_chunk() {
            let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
            message.push(part);
            left = rest;
        }
        (!self.has_ended).then_some(message)
    }
}
