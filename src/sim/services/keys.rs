//! The key files of a simulated cluster. They have no name on the disk, so nothing stays behind.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The key that clients send.
pub const API_KEY: &str = "key-of-clients";
/// The key that the operator sends.
pub const ADMIN_KEY: &str = "key-of-operators";
/// A key that no process accepts.
pub const WRONG_KEY: &str = "key-of-nobody";

/// The files of all runs of this process.
#[derive(Debug)]
pub struct KeyFiles {
    cluster: File,
    api: File,
    admin: File,
}

impl KeyFiles {
    /// The files, made at the first call.
    ///
    /// # Panics
    /// The folder for temporary files cannot be written.
    pub fn get() -> &'static KeyFiles {
        static FILES: OnceLock<KeyFiles> = OnceLock::new();
        FILES.get_or_init(|| {
            let file = |name: &str, bytes: &[u8]| {
                nameless(name, bytes).expect("the folder for temporary files can be written")
            };
            KeyFiles {
                cluster: file("cluster", &[7; 32]),
                api: file("api", API_KEY.as_bytes()),
                admin: file("admin", ADMIN_KEY.as_bytes()),
            }
        })
    }

    /// The flag of processes with a cluster key.
    pub fn cluster_flag(&self) -> String {
        flag("--cluster-key-file", &self.cluster)
    }

    /// The flag of processes with API keys.
    pub fn api_flag(&self) -> String {
        flag("--api-key-file", &self.api)
    }

    /// The flag of processes with admin keys.
    pub fn admin_flag(&self) -> String {
        flag("--admin-key-file", &self.admin)
    }
}

fn flag(name: &str, file: &File) -> String {
    format!(" {name} /proc/self/fd/{}", file.as_raw_fd())
}

fn nameless(name: &str, bytes: &[u8]) -> io::Result<File> {
    let name = format!("baton-sim-{}-{name}", std::process::id());
    let path: PathBuf = std::env::temp_dir().join(name);
    let mut file = File::create_new(&path)?;
    fs::remove_file(&path)?;
    file.write_all(bytes)?;
    Ok(file)
}
