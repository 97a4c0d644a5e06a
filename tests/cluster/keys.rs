//! A cluster key in a file. Drop removes the file.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

pub struct KeyFile {
    path: PathBuf,
}

impl KeyFile {
    /// 40 times this byte, readable only by the owner.
    pub fn new(byte: u8) -> KeyFile {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("baton-key-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::write(&path, [byte; 40]).expect("a file can be written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("it is ours");
        KeyFile { path }
    }

    pub fn path(&self) -> &str {
        self.path.to_str().expect("an ASCII path")
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
