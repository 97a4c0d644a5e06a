//! Finds strings in a text that arrives in pieces, such as stop strings and tags.
//!
//! Owns: the text that must be held back. Invariants: the match that completes first wins; if
//! several complete at the same byte, the longest wins. So the result does not depend on the
//! pieces. Text that can be part of a match is not released. Cuts are between characters, because a
//! string starts with a whole character. After construction only the caller's buffer allocates.

/// A string that was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextMatch {
    /// Its index in the list of strings.
    pub index: usize,
    /// The number of bytes of the last piece up to its end.
    pub end: usize,
}

/// Watches one text.
#[derive(Clone, Debug)]
pub struct TextMatcher {
    needles: Vec<Needle>,
    /// The end of the text so far, if it can be the start of a match.
    held: String,
}

/// One string, and the length of its prefix with which the text ends (algorithm of Knuth,
/// Morris and Pratt).
#[derive(Clone, Debug)]
struct Needle {
    bytes: Box<[u8]>,
    /// For each length of a partial match: the length of the next shorter partial match at its end.
    shorter: Box<[usize]>,
    matched: usize,
}

impl TextMatcher {
    /// A matcher for `strings`, none of them empty.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Self {
        let needles: Vec<_> = strings.iter().map(|string| Needle::new(string.as_ref())).collect();
        let longest = needles.iter().map(|needle| needle.bytes.len()).max().unwrap_or(0);
        Self { needles, held: String::with_capacity(longest) }
    }

    /// Takes the next piece and appends to `out` the text that can be released. At a match, `out`
    /// has the text before it, the rest of the piece is not taken, and the matcher starts anew.
    pub fn push(&mut self, piece: &str, out: &mut String) -> Option<TextMatch> {
        for (i, &byte) in piece.as_bytes().iter().enumerate() {
            self.needles.iter_mut().for_each(|needle| needle.advance(byte));
            let complete =
                self.needles.iter().enumerate().filter(|(_, needle)| needle.is_complete());
            if let Some((index, needle)) = complete.max_by_key(|(_, needle)| needle.bytes.len()) {
                let keep = self.held.len() + i + 1 - needle.bytes.len();
                self.release(piece, keep, out);
                self.reset();
                return Some(TextMatch { index, end: i + 1 });
            }
        }
        let doubtful = self.needles.iter().map(|needle| needle.matched).max().unwrap_or(0);
        let keep = self.held.len() + piece.len() - doubtful;
        self.release(piece, keep, out);
        None
    }

    /// The text ended without a match: releases what was held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.reset();
    }

    /// Moves the first `count` bytes of the held text and `piece` to `out`, and holds the rest.
    fn release(&mut self, piece: &str, count: usize, out: &mut String) {
        let from_held = count.min(self.held.len());
        let from_piece = count - from_held;
        out.push_str(&self.held[..from_held]);
        out.push_str(&piece[..from_piece]);
        self.held.drain(..from_held);
        self.held.push_str(&piece[from_piece..]);
    }

    fn reset(&mut self) {
        self.held.clear();
        self.needles.iter_mut().for_each(|needle| needle.matched = 0);
    }
}

impl Needle {
    fn new(string: &str) -> Self {
        debug_assert!(!string.is_empty(), "an empty string is everywhere");
        let mut needle = Self {
            bytes: string.as_bytes().into(),
            shorter: vec![0; string.len() + 1].into(),
            matched: 0,
        };
        // The table results from matching the string against itself, shifted by one byte.
        for at in 1..string.len() {
            needle.advance(needle.bytes[at]);
            needle.shorter[at + 1] = needle.matched;
        }
        needle.matched = 0;
        needle
    }

    /// Extends the match by `byte`. The match must not be complete.
    fn advance(&mut self, byte: u8) {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.shorter[self.matched];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
    }

    fn is_complete(&self) -> bool {
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stops(stops: &[&str]) -> Vec<String> {
        stops.iter().map(|&stop| stop.to_owned()).collect()
    }

    /// The text shown after each piece, and the stop string found.
    fn run(stop: &[String], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut matcher = TextMatcher::new(stop);
        let mut shown = Vec::new();
        for piece in pieces {
            let mut out = String::new();
            let found = matcher.push(piece, &mut out);
            shown.push(out);
            if let Some(found) = found {
                return (shown, Some(found.index));
            }
        }
        let mut out = String::new();
        matcher.finish(&mut out);
        shown.push(out);
        (shown, None)
    }

    /// The position and index of the stop string that ends first; of several, the longest.
    fn naive(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        let found =
            stops.iter().enumerate().filter_map(|(i, stop)| Some((text.find(stop.as_str())?, i)));
        found.min_by_key(|&(at, i)| (at + stops[i].len(), at, std::cmp::Reverse(i)))
    }

    #[test]
    fn text_that_could_become_a_stop_string_is_held_back() {
        let both = stops(&["\n\nUser:", "</s>"]);
        assert_eq!(
            run(&both, &["Hi\n", "\nUse", "less <", "/s", ">x"]).0,
            ["Hi", "", "\n\nUseless ", "", ""]
        );
        assert_eq!(
            run(&both, &["Hi\n", "\nUse", "r: x"]),
            (vec!["Hi".into(), "".into(), "".into()], Some(0))
        );
        assert_eq!(run(&both, &["a<", "/"]).0, ["a", "", "</"]);
        assert_eq!(run(&[], &["ab", "c"]), (vec!["ab".into(), "c".into(), "".into()], None));
    }

    #[test]
    fn the_first_to_be_complete_wins() {
        assert_eq!(run(&stops(&["abcd", "bc"]), &["xabcd"]), (vec!["xa".into()], Some(1)));
        assert_eq!(run(&stops(&["c", "bc"]), &["xabcd"]), (vec!["xa".into()], Some(1)));
        assert_eq!(run(&stops(&["aab"]), &["aa", "aab"]), (vec!["".into(), "aa".into()], Some(0)));
    }

    #[test]
    fn cuts_between_characters() {
        // The first bytes of é and è are equal.
        assert_eq!(run(&stops(&["éa"]), &["xè", "yé", "b"]).0, ["xè", "y", "éb", ""]);
    }

    proptest! {
        #[test]
        fn finds_the_same_stop_string_as_a_search_of_the_whole_text(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stop in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let text = pieces.concat();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (shown, found) = run(&stop, &pieces);
            match naive(&text, &stop) {
                None => {
                    prop_assert_eq!(found, None);
                    prop_assert_eq!(shown.concat(), text);
                }
                Some((at, which)) => {
                    prop_assert_eq!(shown.concat(), &text[..at]);
                    prop_assert_eq!(found.map(|i| stop[i].as_str()), Some(stop[which].as_str()));
                }
            }
        }

        #[test]
        fn holds_back_no_more_than_it_must(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stop in prop::collection::vec("[abé]{1,4}", 1..4),
        ) {
            let mut matcher = TextMatcher::new(&stop);
            let (mut text, mut shown) = (String::new(), String::new());
            for piece in &pieces {
                text.push_str(piece);
                if matcher.push(piece, &mut shown).is_some() {
                    break;
                }
                let starts = text.char_indices().map(|(at, _)| &text[at..]);
                let doubtful = starts
                    .filter(|end| stop.iter().any(|s| s.starts_with(end)))
                    .map(str::len)
                    .max();
                prop_assert_eq!(text.len() - shown.len(), doubtful.unwrap_or(0));
            }
        }
    }
}
