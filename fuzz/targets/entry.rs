//! A worker's registry entry: an entry that was read and written again reads the same.

use baton::registry::entry::Entry;

pub fn run(data: &[u8]) {
    let Ok(entry) = Entry::parse(data) else { return };
    assert_eq!(Entry::parse(&entry.to_json()), Ok(entry));
}
