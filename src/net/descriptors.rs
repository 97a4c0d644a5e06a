//! File descriptors sent over a unix stream together with bytes (SCM_RIGHTS).
//!
//! Thread: any. Invariants: one read returns at most [`DESCRIPTORS_MAX`] descriptors. A received
//! descriptor closes on exec and belongs to the caller. Sockets are non-blocking, so an error can
//! be `WouldBlock`.
#![allow(unsafe_code)]

use crate::limits::DESCRIPTORS_MAX;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Space for the control messages of one call, aligned as `cmsghdr` needs.
#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; CONTROL_LEN]);

// SAFETY: arithmetic without access to memory.
const CONTROL_LEN: usize =
    unsafe { libc::CMSG_SPACE((DESCRIPTORS_MAX * size_of::<RawFd>()) as u32) } as usize;

/// Writes bytes, and descriptors with the first byte. Returns how many bytes the socket took. Needs
/// at least one byte, and 1 to [`DESCRIPTORS_MAX`] descriptors.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    if bytes.is_empty() || descriptors.is_empty() || descriptors.len() > DESCRIPTORS_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut control = Control([MaybeUninit::zeroed(); CONTROL_LEN]);
    let mut slices = [IoSlice::new(bytes)];
    let data_len = size_of_val(descriptors) as u32;
    // SAFETY: all fields of `msghdr` can be zero.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = slices.as_mut_ptr().cast();
    header.msg_iovlen = slices.len() as _;
    header.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: arithmetic without access to memory.
    header.msg_controllen = unsafe { libc::CMSG_SPACE(data_len) } as _;
    // SAFETY: `control` is aligned, large enough for one message of `data_len` bytes, and zeroed.
    // So the first header is at its beginning. Raw descriptors are plain integers.
    unsafe {
        let message = libc::CMSG_FIRSTHDR(&header);
        (*message).cmsg_level = libc::SOL_SOCKET;
        (*message).cmsg_type = libc::SCM_RIGHTS;
        (*message).cmsg_len = libc::CMSG_LEN(data_len) as _;
        let data = libc::CMSG_DATA(message).cast::<RawFd>();
        for (index, descriptor) in descriptors.iter().enumerate() {
            data.add(index).write_unaligned(descriptor.as_raw_fd());
        }
    }
    // SAFETY: `header` points at `slices` and `control`, which outlive the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Reads bytes and appends the descriptors that came with them; 0 bytes is the end of the stream.
///
/// # Errors
/// More descriptors came than fit; none of this read is kept.
pub fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut control = Control([MaybeUninit::zeroed(); CONTROL_LEN]);
    let mut slices = [IoSliceMut::new(bytes)];
    // SAFETY: all fields of `msghdr` can be zero.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = slices.as_mut_ptr().cast();
    header.msg_iovlen = slices.len() as _;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_LEN as _;
    // SAFETY: `header` points at `slices` and `control`, which outlive the call.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    let kept = descriptors.len();
    // SAFETY: the kernel wrote whole control messages up to `msg_controllen`, and the macros stay
    // inside. Each descriptor of SCM_RIGHTS is new in this process and has no other owner.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(&header);
        while !message.is_null() {
            if (*message).cmsg_level == libc::SOL_SOCKET && (*message).cmsg_type == libc::SCM_RIGHTS
            {
                let data = libc::CMSG_DATA(message).cast::<RawFd>();
                let data_len = (*message).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for index in 0..data_len / size_of::<RawFd>() {
                    descriptors.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            message = libc::CMSG_NXTHDR(&header, message);
        }
    }
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        descriptors.truncate(kept);
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors at once"));
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_descriptor_arrives_with_its_bytes_and_closes_on_exec() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let region = crate::kv::region::Region::new(c"passed", 4096).unwrap();
        let null = File::open("/dev/null").unwrap();
        assert_eq!(send(ours.as_fd(), b"hello", &[region.descriptor(), null.as_fd()]).unwrap(), 5);
        let (mut bytes, mut descriptors) = ([0; 16], Vec::new());
        assert_eq!(receive(theirs.as_fd(), &mut bytes, &mut descriptors).unwrap(), 5);
        assert_eq!((&bytes[..5], descriptors.len()), (&b"hello"[..], 2));
        crate::kv::region::PeerRegion::map(descriptors[0].as_fd(), 4096).unwrap();
        for descriptor in &descriptors {
            // SAFETY: `fcntl` on an open descriptor.
            let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFD) };
            assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        }
        drop(ours);
        assert_eq!(receive(theirs.as_fd(), &mut bytes, &mut descriptors).unwrap(), 0);
    }

    #[test]
    fn the_file_behind_a_passed_descriptor_is_the_same() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (read, mut write) = std::io::pipe().unwrap();
        send(ours.as_fd(), b"x", &[read.as_fd()]).unwrap();
        drop(read);
        let mut descriptors = Vec::new();
        receive(theirs.as_fd(), &mut [0; 1], &mut descriptors).unwrap();
        write.write_all(b"through").unwrap();
        drop(write);
        let mut text = String::new();
        File::from(descriptors.remove(0)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }

    #[test]
    fn too_many_descriptors_are_refused_on_both_ends() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let many = vec![null.as_fd(); DESCRIPTORS_MAX + 1];
        assert!(send(ours.as_fd(), b"x", &many).is_err());
        assert!(send(ours.as_fd(), b"", &many[..1]).is_err());
        theirs.set_nonblocking(true).unwrap();
        let error = receive(theirs.as_fd(), &mut [0; 1], &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
