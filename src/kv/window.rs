//! Which pages of a sequence its next tokens read, if each token sees only a window of the last
//! ones.
//!
//! Arithmetic only. [`super::groups`] says which layers have a window.

/// The part of a sequence that a token sees, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvWindow {
    /// Tokens that a token sees, its own included; `None`: all.
    tokens: Option<u32>,
    page_size: u32,
    /// Pages from this one on stay, whatever the window is.
    stay_from: u32,
}

impl KvWindow {
    /// A window of `tokens` tokens, at least 1, over pages of `page_size` tokens; `None`: a token
    /// sees all tokens before it.
    pub fn new(tokens: Option<u32>, page_size: u32) -> KvWindow {
        debug_assert!(tokens != Some(0) && page_size > 0, "a token sees itself");
        // With one token, a sequence with a full last page would need no page at all.
        KvWindow { tokens: tokens.map(|tokens| tokens.max(2)), page_size, stay_from: u32::MAX }
    }

    /// The same if all pages from the `page`-th one on stay.
    pub fn staying_from(self, page: u32) -> KvWindow {
        KvWindow { stay_from: page, ..self }
    }

    /// Whether a token sees all tokens before it.
    pub fn is_endless(&self) -> bool {
        self.tokens.is_none()
    }

    /// Pages behind the window: those of the first tokens that no token at `next` or after it sees.
    pub fn pages_behind(&self, next: u32) -> u32 {
        let behind = |tokens| next.saturating_add(1).saturating_sub(tokens) / self.page_size;
        self.tokens.map_or(0, behind).min(self.stay_from)
    }

    /// Pages of `tokens` tokens, of which none is left out.
    pub fn pages(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_size)
    }

    /// Most pages that a growing sequence of at most `tokens` tokens needs at a time, if none has
    /// to stay.
    pub fn most_pages(&self, tokens: u32) -> u32 {
        let spanned =
            self.tokens.map_or(u32::MAX, |window| (window - 1).div_ceil(self.page_size) + 1);
        self.pages(tokens).min(spanned)
    }
}

/// Where the cached part of a sequence must begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// At this page. The request does not read the ones before it.
    From(u32),
    /// At the first page that the token behind the cached part sees.
    Back(KvWindow),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_that_a_sequence_keeps_are_those_that_its_next_token_sees() {
        for (tokens, page_size) in [(1, 1), (1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (9, 4), (7, 1)]
        {
            let window = KvWindow::new(Some(tokens), page_size);
            for next in 1..60 {
                let behind = window.pages_behind(next);
                let seen = (0..=next).filter(|&at| next - at < tokens.max(2));
                let first = seen.min().unwrap() / page_size;
                assert_eq!(behind, first, "window {tokens}, pages of {page_size}, next {next}");
                let held = window.pages(next + 1) - behind;
                assert!(held <= window.most_pages(next + 1), "{held} pages at {next}");
                assert!(window.pages(next) > behind, "no page is left at {next}");
            }
            let most = (1..60).map(|next| window.pages(next + 1) - window.pages_behind(next)).max();
            assert_eq!(most, Some(window.most_pages(60)), "the bound is reached");
        }
    }

    #[test]
    fn without_a_window_all_pages_are_read() {
        let window = KvWindow::new(None, 4);
        assert!(window.is_endless());
        assert_eq!((window.pages_behind(1000), window.most_pages(1001)), (0, 251));
    }
}
