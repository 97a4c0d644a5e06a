//! A model hub's list of files: what is accepted cannot leave the cache's directories.

use baton::hub::file_list::HubListing;
use std::path::{Component, Path};

pub fn run(data: &[u8]) {
    let Ok(listing) = HubListing::parse(data) else { return };
    let is_plain = |path: &str| {
        let mut parts = Path::new(path).components();
        !path.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
    };
    assert!(is_plain(&listing.commit) && !listing.commit.contains('/'));
    for file in &listing.files {
        assert!(is_plain(&file.path), "{:?}", file.path);
        assert!(is_plain(file.digest.hex()) && !file.digest.hex().contains('/'));
    }
}
