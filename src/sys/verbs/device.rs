//! An open device and a protection domain on it: what all other objects hang from.
//!
//! Each object holds an `Arc` of the one it was made from, so that they end in the order the library asks for:
//! queue pairs and registrations before their domain, completion queues before their device.
#![allow(unsafe_code)]

use super::abi::{Context, ListedDevice, Pd};
use super::devices::{DeviceInfo, Listed, describe, is_active};
use super::library::{Library, Unavailable};
use std::fmt;
use std::io;
use std::sync::Arc;

/// An open device, closed when dropped.
pub struct Device {
    pub(super) library: &'static Library,
    pub(super) context: *mut Context,
    name: String,
}

/// Why a device is not open.
#[derive(Debug)]
pub enum NotOpen {
    /// There are no verbs here.
    Unavailable(Unavailable),
    /// No device of this name.
    Unknown,
    /// It is there and cannot be opened.
    Refused(io::Error),
}

// SAFETY: the library's functions lock for themselves whatever they change of a context, so that it may be used
// by any thread and by several at once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The device that `ibv_devices` calls so.
    pub fn open(name: &str) -> Result<Arc<Device>, NotOpen> {
        let listed = Listed::get().map_err(NotOpen::Unavailable)?;
        let device = listed.devices().find(|&device| listed.name(device) == name);
        let device = device.ok_or(NotOpen::Unknown)?;
        // SAFETY: a device of a list that is still held.
        let opened = unsafe { Device::open_listed(listed.library, device, name.into()) };
        opened.map(Arc::new).map_err(NotOpen::Refused)
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it can do, with its ports and their addresses, as they are now.
    pub fn info(&self) -> io::Result<DeviceInfo> {
        describe(self)
    }

    /// Whether a port, from 1, is up now.
    pub fn is_active(&self, port: u8) -> io::Result<bool> {
        is_active(self, port)
    }

    /// # Safety
    /// `device` is one that `library` lists, and is still listed.
    pub(super) unsafe fn open_listed(
        library: &'static Library,
        device: *mut ListedDevice,
        name: String,
    ) -> io::Result<Device> {
        // SAFETY: by the caller; null is an error.
        let context = made(unsafe { (library.open_device)(device) })?;
        Ok(Device { library, context, name })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: open, and closed once; nothing hangs from it, since all that does holds an `Arc` of it.
        unsafe { (self.library.close_device)(self.context) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name).finish()
    }
}

impl fmt::Display for NotOpen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotOpen::Unavailable(why) => why.fmt(f),
            NotOpen::Unknown => f.write_str("there is no such device"),
            NotOpen::Refused(error) => write!(f, "cannot be opened: {error}"),
        }
    }
}

impl std::error::Error for NotOpen {}

/// What registrations and queue pairs belong to; those of one domain alone work together.
pub struct Domain {
    pub(super) pd: *mut Pd,
    pub(super) device: Arc<Device>,
}

// SAFETY: as for `Device`: the library allows all threads, and a domain has no state of its own.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// A domain of its own.
    pub fn new(device: &Arc<Device>) -> io::Result<Arc<Domain>> {
        // SAFETY: an open device; null is an error.
        let pd = made(unsafe { (device.library.alloc_pd)(device.context) })?;
        Ok(Arc::new(Domain { pd, device: device.clone() }))
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn library(&self) -> &'static Library {
        self.device.library
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made by `new`, ended once; registrations and queue pairs hold an `Arc` of it.
        unsafe { (self.library().dealloc_pd)(self.pd) };
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Domain").field(&self.device.name).finish()
    }
}

/// Functions that make something give null and set `errno`.
pub(super) fn made<T>(object: *mut T) -> io::Result<*mut T> {
    if object.is_null() { Err(io::Error::last_os_error()) } else { Ok(object) }
}

/// Most other functions give 0 or an error number.
pub(super) fn done(result: std::ffi::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        error => Err(io::Error::from_raw_os_error(error.abs())),
    }
}
