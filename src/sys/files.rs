//! How many files and sockets this process may have open at once.
#![allow(unsafe_code)]

use std::io;

/// Takes as many as the system lets it: shells give out 1,024 for the sake of programs that use select(2), which none
/// here does. Says how many those are; `u64::MAX` for any number.
pub fn raise_open_files() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes the struct it is given.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: reads the struct it is given. To raise a soft limit to the hard one needs no privilege.
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
        let told = std::fs::read_to_string("/proc/self/limits").unwrap();
        let line = told.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        let numbers: Vec<&str> = line.split_whitespace().take(2).collect();
        assert_eq!(numbers[0], numbers[1]);
        assert!(numbers[0] == "unlimited" || numbers[0] == most.to_string());
    }
}
