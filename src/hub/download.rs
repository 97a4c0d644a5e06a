//! Fetches files of a hub into the cache, each once, and continues after a break.
//!
//! Thread: the thread that starts the process; one connection at a time. Invariants: a file of the
//! cache is whole, and it had the hash of the listing. No byte is fetched twice, unless the host
//! ignores the range of a request. Not here: which files (`selection`).

use super::cache::{RepositoryCache, percent};
use super::client::{HubClient, HubFault, describe, wait_for_retry};
use super::error::HubError;
use super::file_list::HubFile;
use super::part::PartFile;
use crate::config::hub::HubConfig;
use crate::limits::{
    HUB_PIECE, HUB_PROGRESS_BYTES, HUB_PROGRESS_EVERY, HUB_TRIES_MAX, HUB_WINDOW, HUB_WINDOW_BYTES,
};
use crate::obs::log::event;
use std::fs;
use std::io::{ErrorKind, Read};
use std::time::Instant;

const MIB: f64 = 1024.0 * 1024.0;

/// Fetches the files of one commit.
pub struct Downloader<'a> {
    /// The model and the hub.
    pub hub: &'a HubConfig,
    /// The cache of the repository.
    pub cache: &'a RepositoryCache,
    /// The connection.
    pub client: &'a HubClient,
    /// The commit.
    pub commit: &'a str,
}

impl Downloader<'_> {
    /// Puts a file into the snapshot of the commit, if it is not there.
    ///
    /// # Errors
    /// The file cannot be fetched, is not what the listing says, or cannot be stored.
    pub fn fetch(&self, file: &HubFile) -> Result<(), HubError> {
        if self.cache.has(self.commit, file) {
            return Ok(());
        }
        let _lock = self.cache.lock(file)?;
        let blob = self.cache.blob(file);
        // Another process can have fetched it, or another commit has the same content.
        match fs::metadata(&blob) {
            Ok(found) if found.len() == file.size => {}
            Ok(_) => {
                fs::remove_file(&blob).map_err(|error| HubError::disk(&blob, error))?;
                self.download(file)?;
            }
            Err(error) if error.kind() == ErrorKind::NotFound => self.download(file)?,
            Err(error) => return Err(HubError::disk(&blob, error)),
        }
        self.cache.link(self.commit, file)
    }

    fn download(&self, file: &HubFile) -> Result<(), HubError> {
        let mut part = PartFile::open(self.cache.part(file), file)?;
        let mut progress = Progress::begin(file, part.len());
        let mut failures = 0;
        while !part.is_whole() {
            let before = part.len();
            match self.download_once(file, &mut part, &mut progress) {
                Ok(()) => {}
                Err(HubFault::Final(error)) => return Err(error),
                Err(HubFault::Passing(reason)) => {
                    let is_success = part.len() >= before.saturating_add(HUB_PROGRESS_BYTES);
                    failures = if is_success { 1 } else { failures + 1 };
                    if failures >= HUB_TRIES_MAX {
                        let url = format!("{}/{}", self.hub.endpoint, self.hub.name.repository);
                        let reason = format!("{}: {reason}", file.path);
                        return Err(HubError::Unreachable { url, reason, tries: failures });
                    }
                    wait_for_retry(&file.path, failures, &reason);
                }
            }
        }
        part.finish(&self.cache.blob(file))?;
        progress.finish();
        Ok(())
    }

    /// Fetches the missing bytes over one connection.
    fn download_once(
        &self,
        file: &HubFile,
        part: &mut PartFile<'_>,
        progress: &mut Progress<'_>,
    ) -> Result<(), HubFault> {
        let repository = &self.hub.name.repository;
        let answer = self.client.open_file(repository, self.commit, &file.path, part.len())?;
        if let Some(size) = answer.size.filter(|&size| size != file.size) {
            let [expected, found] = [file.size, size].map(|size| format!("{size} bytes"));
            return Err(HubFault::Final(part.refuse("size", expected, found)));
        }
        if answer.from != part.len() {
            part.reset()?;
        }
        let (mut bytes, mut piece) = (answer.bytes, vec![0; HUB_PIECE]);
        let mut window = (Instant::now(), part.len());
        loop {
            let count = match bytes.read(&mut piece) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(HubFault::Passing(describe(&error))),
            };
            if count == 0 && part.is_whole() {
                return Ok(());
            }
            if count == 0 {
                return Err(HubFault::Passing("the connection ended early".to_owned()));
            }
            part.append(&piece[..count])?;
            progress.step(part.len());
            if window.0.elapsed() >= HUB_WINDOW {
                let came = part.len() - window.1;
                if came < HUB_WINDOW_BYTES {
                    let reason = format!("{came} bytes in {} s are too slow", HUB_WINDOW.as_secs());
                    return Err(HubFault::Passing(reason));
                }
                window = (Instant::now(), part.len());
            }
        }
    }
}

/// Log lines about one file.
struct Progress<'a> {
    file: &'a HubFile,
    /// Length and time at the beginning, and at the last log line.
    begun: (u64, Instant),
    told: (u64, Instant),
}

impl Progress<'_> {
    fn begin(file: &HubFile, length: u64) -> Progress<'_> {
        event!(
            Info,
            "hub",
            "fetching",
            file = file.path,
            mib = format!("{:.1}", file.size as f64 / MIB),
            percent = percent(length, file.size)
        );
        let begun = (length, Instant::now());
        Progress { file, begun, told: begun }
    }

    fn step(&mut self, length: u64) {
        let now = Instant::now();
        let past = now.duration_since(self.told.1);
        if past >= HUB_PROGRESS_EVERY {
            event!(
                Info,
                "hub",
                "fetch continues",
                file = self.file.path,
                percent = percent(length, self.file.size),
                mib_per_s = rate(length.saturating_sub(self.told.0), past.as_secs_f64())
            );
            self.told = (length, now);
        }
    }

    fn finish(&self) {
        let seconds = self.begun.1.elapsed().as_secs_f64();
        event!(
            Info,
            "hub",
            "fetched",
            file = self.file.path,
            seconds = format!("{seconds:.1}"),
            mib_per_s = rate(self.file.size.saturating_sub(self.begun.0), seconds)
        );
    }
}

fn rate(bytes: u64, seconds: f64) -> String {
    format!("{:.1}", bytes as f64 / MIB / seconds.max(1e-3))
}
