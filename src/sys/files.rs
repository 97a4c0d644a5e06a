//! The limit of open files and sockets of this process.
#![allow(unsafe_code)]

use std::io;

/// Raises the soft limit of open files to the hard limit and returns it; `u64::MAX` means no limit.
/// Shells set 1,024 for programs that use select(2), and Baton does not use it.
pub fn raise_open_files() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes the given struct.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the call reads the given struct. Raising a soft limit to the hard limit needs no
        // privilege.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_the_hard_one_afterwards() {
        let most = raise_open_files().unwrap();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        let numbers: Vec<&str> = line.split_whitespace().take(2).collect();
        assert_eq!(numbers[0], numbers[1]);
        assert!(numbers[0] == "unlimited" || numbers[0] == most.to_string());
    }
}
