//! Bounds on what a model hub sends, and on the waits for it and for its cache.

use std::time::Duration;

/// Longest name of an owner or a repository in bytes: the hub's own bound.
pub const HUB_NAME_MAX: usize = 96;
/// Longest path of a file in a repository, or name of a revision, in bytes. Names of published
/// files have under two hundred.
pub const HUB_PATH_MAX: usize = 1024;
/// Most bytes of a token or its file. Tokens have under a hundred.
pub const HUB_TOKEN_MAX: usize = 4096;
/// Longest list of a repository's files in bytes. A file takes about 300, so the largest
/// repositories of models take a few megabytes.
pub const HUB_LISTING_MAX: usize = 32 << 20;
/// Most files of a repository. Large repositories of models have some thousand.
pub const HUB_FILES_MAX: usize = 1 << 16;
/// Files of a repository that an error lists. More files do not help to choose one.
pub const HUB_FILES_SHOWN: usize = 20;
/// Redirects of one request. A renamed repository takes one, and a store of large files another.
pub const HUB_REDIRECTS_MAX: u32 = 5;
/// Time for a connection, with its TLS handshake and that of a proxy.
pub const HUB_CONNECT_TIME: Duration = Duration::from_secs(10);
/// How long a host may send nothing while an answer is due. The store of large files can take
/// seconds for the first byte.
pub const HUB_SILENCE_MAX: Duration = Duration::from_secs(30);
/// A file must bring [`HUB_WINDOW_BYTES`] in each time as long as this, or the next try follows.
pub const HUB_WINDOW: Duration = Duration::from_secs(60);
/// Bytes of a file in [`HUB_WINDOW`]: the slowest modems brought more.
pub const HUB_WINDOW_BYTES: u64 = 64 << 10;
/// Time for the list of a repository's files, from the request to the last byte.
pub const HUB_LISTING_TIME: Duration = Duration::from_secs(60);
/// Tries in a row that bring less than [`HUB_PROGRESS_BYTES`]. With [`HUB_RETRY_DELAY`], a hub that
/// restarts within seconds is not given up.
pub const HUB_TRIES_MAX: u32 = 5;
/// Bytes of a file after which a try counts as successful, so that a large file outlasts many
/// breaks. A hub that sends less and breaks each time is given up.
pub const HUB_PROGRESS_BYTES: u64 = 1 << 20;
/// Wait before the second try. Each further wait is twice as long: 7.5 s for [`HUB_TRIES_MAX`].
pub const HUB_RETRY_DELAY: Duration = Duration::from_millis(500);
/// Time between two log lines about one file.
pub const HUB_PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// Time between two looks at a lock that another process holds.
pub const HUB_LOCK_INTERVAL: Duration = Duration::from_millis(100);
/// How long another process may hold the lock of a file while its part does not grow. It first
/// hashes the part that it resumes: 50 GB, the hub's largest files, take some minutes. Its own
/// tries also end in this time.
pub const HUB_LOCK_SILENCE_MAX: Duration = Duration::from_secs(600);
/// Bytes that are read from the hub, or from a part, at once.
pub const HUB_PIECE: usize = 256 << 10;
