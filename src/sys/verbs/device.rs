//! An open device and a protection domain on it. All other objects depend on them.
//!
//! Each object holds an `Arc` of its parent, so that objects are destroyed in the order that the
//! library needs. Queue pairs and registrations end before their domain, completion queues before
//! their device.
#![allow(unsafe_code)]

use super::abi::{Context, ListedDevice, Pd};
use super::library::{Library, Unavailable};
use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;
use std::{fmt, io};

/// An open device, closed when dropped.
pub struct Device {
    pub(super) library: &'static Library,
    pub(super) context: *mut Context,
    name: String,
}

/// Why a device is not open.
#[derive(Debug)]
pub enum NotOpen {
    /// The verbs library is not available.
    Unavailable(Unavailable),
    /// No device of this name.
    Unknown,
    /// The device exists but cannot be opened.
    Refused(io::Error),
}

// SAFETY: the library's functions lock all state of a context that they change. Any thread, and
// several at once, can use it.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The device with this name in `ibv_devices`.
    pub fn open(name: &str) -> Result<Arc<Device>, NotOpen> {
        let listed = Listed::get().map_err(NotOpen::Unavailable)?;
        let device = listed.devices().find(|&device| listed.name(device) == name);
        let device = device.ok_or(NotOpen::Unknown)?;
        // SAFETY: the device belongs to a list that is still held.
        let opened = unsafe { Device::open_listed(listed.library, device, name.into()) };
        opened.map(Arc::new).map_err(NotOpen::Refused)
    }

    /// The name of the device.
    pub fn name(&self) -> &str {
        &self.name
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
        // SAFETY: open, and closed once. Nothing depends on it: each dependent object holds an
        // `Arc` of it.
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

/// The owner of registrations and queue pairs. Only those of the same domain work together.
pub struct Domain {
    pub(super) pd: *mut Pd,
    pub(super) device: Arc<Device>,
}

// SAFETY: as for `Device`: the library allows all threads, and a domain has no state of its own.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// Creates a protection domain.
    pub fn new(device: &Arc<Device>) -> io::Result<Arc<Domain>> {
        // SAFETY: the device is open; null is an error.
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
        // SAFETY: created by `new`, destroyed once; registrations and queue pairs hold an `Arc` of
        // it.
        unsafe { (self.library().dealloc_pd)(self.pd) };
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Domain").field(&self.device.name).finish()
    }
}

/// The library's list of devices, freed when dropped.
pub(super) struct Listed {
    pub(super) library: &'static Library,
    devices: *mut *mut ListedDevice,
    count: usize,
}

impl Listed {
    pub(super) fn get() -> Result<Listed, Unavailable> {
        let library = Library::get()?;
        let mut count: c_int = 0;
        // SAFETY: `count` is writable; the result is null or an array of that many devices.
        let devices = unsafe { (library.get_device_list)(&mut count) };
        if devices.is_null() {
            let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            // The answer of a kernel without the RDMA subsystem.
            return match error {
                libc::ENOSYS => Ok(Listed { library, devices, count: 0 }),
                _ => Err(Unavailable::Devices(error)),
            };
        }
        Ok(Listed { library, devices, count: usize::try_from(count).unwrap_or(0) })
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = *mut ListedDevice> {
        // SAFETY: below the count. The library owns the device until the list is freed.
        (0..self.count).map(|index| unsafe { *self.devices.add(index) })
    }

    pub(super) fn name(&self, device: *mut ListedDevice) -> String {
        // SAFETY: a device of this list; the name is part of it.
        unsafe { text((self.library.get_device_name)(device)) }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if !self.devices.is_null() {
            // SAFETY: freed once; open devices stay open.
            unsafe { (self.library.free_device_list)(self.devices) };
        }
    }
}

/// # Safety
/// Null, or a string that ends with 0.
pub(super) unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

/// The result of functions that create an object: they return null and set `errno` on failure.
pub(super) fn made<T>(object: *mut T) -> io::Result<*mut T> {
    if object.is_null() { Err(io::Error::last_os_error()) } else { Ok(object) }
}

/// The result of most other functions: 0 or an error number.
pub(super) fn done(result: std::ffi::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        error => Err(io::Error::from_raw_os_error(error.abs())),
    }
}
