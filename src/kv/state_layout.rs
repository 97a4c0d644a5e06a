//! Where the recurrent state of a sequence lies on its pages: state that layers keep for a whole
//! sequence, not for each token.
//!
//! Arithmetic only. The state of a layer is cut into pieces of equal size, and no piece is divided
//! between pages. So state fits on pages that have the size of other layers' keys and values.

/// The state of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateShape {
    /// Layers with state.
    pub layers: u32,
    /// Pieces of a layer.
    pub pieces: u32,
    /// Elements of a piece, of 4 bytes each.
    pub piece_elements: u32,
}

impl StateShape {
    /// Bytes of a piece.
    pub const fn piece_bytes(&self) -> u64 {
        self.piece_elements as u64 * size_of::<f32>() as u64
    }
}

/// The place of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatePlace {
    /// Index in the list of the sequence's state pages.
    pub page: usize,
    /// Offset on this page, in bytes.
    pub offset: u64,
}

/// The division of a sequence's state into pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateLayout {
    shape: StateShape,
    pieces_per_page: u32,
}

impl StateLayout {
    /// State of a `shape` on pages of `page_bytes` bytes; `None` if a piece is larger than a page.
    pub fn new(shape: StateShape, page_bytes: u64) -> Option<StateLayout> {
        let pieces_per_page = u32::try_from(page_bytes / shape.piece_bytes()).unwrap_or(u32::MAX);
        (pieces_per_page > 0).then_some(StateLayout { shape, pieces_per_page })
    }

    /// What lies there.
    pub fn shape(&self) -> &StateShape {
        &self.shape
    }

    /// Bytes of a page that pieces can take.
    pub fn page_bytes(&self) -> u64 {
        u64::from(self.pieces_per_page) * self.shape.piece_bytes()
    }

    /// Pages of the state of one sequence.
    pub fn pages(&self) -> u32 {
        let pieces = u64::from(self.shape.layers) * u64::from(self.shape.pieces);
        pieces.div_ceil(u64::from(self.pieces_per_page)) as u32
    }

    /// The place of a piece of a layer; `layer` counts the layers with state.
    pub fn place(&self, layer: u32, piece: u32) -> StatePlace {
        assert!(layer < self.shape.layers && piece < self.shape.pieces, "a piece of the state");
        let index = u64::from(layer) * u64::from(self.shape.pieces) + u64::from(piece);
        let per_page = u64::from(self.pieces_per_page);
        StatePlace {
            page: (index / per_page) as usize,
            offset: index % per_page * self.shape.piece_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_share_no_bytes_and_stay_on_their_pages() {
        let shape = StateShape { layers: 3, pieces: 5, piece_elements: 16 };
        for page_bytes in [64, 65, 127, 128, 200, 960, 5000] {
            let layout = StateLayout::new(shape, page_bytes).unwrap();
            let mut places = Vec::new();
            for (layer, piece) in (0..3).flat_map(|layer| (0..5).map(move |piece| (layer, piece))) {
                let place = layout.place(layer, piece);
                assert!(place.page < layout.pages() as usize);
                assert!(place.offset.is_multiple_of(64) && place.offset + 64 <= page_bytes);
                assert!(!places.contains(&place), "two pieces at {place:?}");
                places.push(place);
            }
        }
        assert_eq!(StateLayout::new(shape, 63), None);
        assert_eq!(StateLayout::new(shape, 960).unwrap().pages(), 1);
    }
}
