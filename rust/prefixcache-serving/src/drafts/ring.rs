//! The text: pages of tokens, each with the page before it, in the order of their last use.

/// Tokens of a page.
pub const PAGE: usize = 64;

/// No page.
const NONE: u32 = u32::MAX;

/// Where a token stands in the ring: the page's number times [`PAGE`], and the place in the page.
pub(crate) type Place = usize;

/// A page as it was written once. It names nothing once the page holds other text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRef {
    page: u32,
    born: u64,
}

#[derive(Clone)]
struct Page {
    /// Who may read it; 0 for nobody.
    scope: u128,
    /// Different for each text that the page held.
    born: u64,
    /// The stream that wrote or took it last.
    user: u64,
    prev_born: u64,
    prev: u32,
    /// The page that was put after this one last. It is so only if that one says the same.
    next: u32,
    len: u32,
    older: u32,
    newer: u32,
}

impl Page {
    fn empty(born: u64, older: u32, newer: u32) -> Self {
        let (scope, user, prev_born, len) = (0, 0, 0, 0);
        Self { scope, born, user, prev_born, prev: NONE, next: NONE, len, older, newer }
    }
}

/// All pages. A full page may have several pages after it: texts that begin alike share their pages.
pub(crate) struct Ring {
    tokens: Vec<u32>,
    pages: Vec<Page>,
    oldest: u32,
    newest: u32,
    births: u64,
    num_tokens: usize,
}

impl Ring {
    pub(crate) fn new(num_pages: usize) -> Result<Self, std::collections::TryReserveError> {
        let count = num_pages as u32;
        let (mut tokens, mut pages) = (Vec::new(), Vec::new());
        tokens.try_reserve_exact(num_pages * PAGE)?;
        tokens.resize(num_pages * PAGE, 0);
        pages.try_reserve_exact(num_pages)?;
        pages.extend((0..count).map(|page| {
            let newer = if page + 1 < count { page + 1 } else { NONE };
            Page::empty(0, page.wrapping_sub(1), newer)
        }));
        Ok(Self { tokens, pages, oldest: 0, newest: count - 1, births: 0, num_tokens: 0 })
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(crate) fn num_bytes(&self) -> usize {
        size_of_val(&self.tokens[..]) + size_of_val(&self.pages[..])
    }

    fn page(&self, place: Place) -> Option<&Page> {
        self.pages.get(place / PAGE)
    }

    /// The page's number, if it still holds that text.
    fn number(&self, of: Option<PageRef>) -> Option<usize> {
        let of = of?;
        (self.pages[of.page as usize].born == of.born).then_some(of.page as usize)
    }

    fn reference(&self, page: usize) -> PageRef {
        let born = self.pages[page].born;
        PageRef { page: page as u32, born }
    }

    /// Whether there is a token that this scope may read.
    pub(crate) fn is_readable(&self, place: Place, scope: u128) -> bool {
        let page = self.page(place);
        page.is_some_and(|page| page.scope == scope && place % PAGE < page.len as usize)
    }

    pub(crate) fn token(&self, place: Place) -> u32 {
        self.tokens[place]
    }

    pub(crate) fn user(&self, place: Place) -> u64 {
        self.pages[place / PAGE].user
    }

    /// The last token of a page.
    pub(crate) fn end(&self, of: Option<PageRef>) -> Option<Place> {
        let page = self.number(of)?;
        Some(page * PAGE + self.pages[page].len as usize - 1)
    }

    /// The token before a token, unless it was evicted or there is none.
    pub(crate) fn before(&self, place: Place) -> Option<Place> {
        if !place.is_multiple_of(PAGE) {
            return Some(place - 1);
        }
        let page = &self.pages[place / PAGE];
        let prev = self.pages.get(page.prev as usize)?;
        (prev.born == page.prev_born).then_some(page.prev as usize * PAGE + PAGE - 1)
    }

    /// The token after a token, if there is one.
    pub(crate) fn after(&self, place: Place) -> Option<Place> {
        let page = &self.pages[place / PAGE];
        if place % PAGE + 1 < PAGE {
            return (place % PAGE + 1 < page.len as usize).then_some(place + 1);
        }
        let next = self.pages.get(page.next as usize)?;
        let follows = next.prev as usize == place / PAGE && next.prev_born == page.born;
        follows.then_some(page.next as usize * PAGE)
    }

    /// Whether a page up to this place stands after `prev` and holds exactly these tokens.
    pub(crate) fn is_same(
        &self,
        place: Place,
        scope: u128,
        prev: Option<PageRef>,
        text: &[u32],
    ) -> bool {
        let start = place - place % PAGE;
        self.is_readable(place, scope)
            && place % PAGE + 1 == text.len()
            && self.before(start) == self.end(prev)
            && self.tokens[start..=place] == *text
    }

    /// Makes a page the most recently used one, of this stream.
    pub(crate) fn take(&mut self, place: Place, user: u64) -> PageRef {
        self.pages[place / PAGE].user = user;
        self.touch(place);
        self.reference(place / PAGE)
    }

    /// Makes a page the most recently used one.
    pub(crate) fn touch(&mut self, place: Place) {
        let page = (place / PAGE) as u32;
        if page != self.newest {
            self.unlink(page);
            let newest = self.newest;
            self.pages[page as usize].older = newest;
            self.pages[page as usize].newer = NONE;
            self.pages[newest as usize].newer = page;
            self.newest = page;
        }
    }

    fn unlink(&mut self, page: u32) {
        let Page { older, newer, .. } = self.pages[page as usize];
        match self.pages.get_mut(older as usize) {
            Some(older) => older.newer = newer,
            None => self.oldest = newer,
        }
        match self.pages.get_mut(newer as usize) {
            Some(newer) => newer.older = older,
            None => self.newest = older,
        }
    }

    /// An empty page after `tail`, in place of the least recently used one.
    fn begin(&mut self, tail: Option<PageRef>, scope: u128, user: u64) -> PageRef {
        let page = self.oldest as usize;
        self.touch(page * PAGE);
        self.erase(page);
        self.pages[page].scope = scope;
        self.pages[page].user = user;
        if let Some(tail) = self.number(tail) {
            self.pages[page].prev = tail as u32;
            self.pages[page].prev_born = self.pages[tail].born;
            self.pages[tail].next = page as u32;
        }
        self.reference(page)
    }

    fn erase(&mut self, page: usize) {
        self.births += 1;
        self.num_tokens -= self.pages[page].len as usize;
        let Page { older, newer, .. } = self.pages[page];
        self.pages[page] = Page::empty(self.births, older, newer);
    }

    /// Whether the next token of a stream that ends in `tail` begins a page.
    pub(crate) fn is_at_start(&self, tail: Option<PageRef>) -> bool {
        let page = self.number(tail);
        page.is_none_or(|page| self.pages[page].len as usize == PAGE)
    }

    /// Puts a token after the end of `tail`, or of the page that it begins.
    pub(crate) fn push(
        &mut self,
        tail: &mut Option<PageRef>,
        token: u32,
        scope: u128,
        user: u64,
    ) -> Place {
        if self.is_at_start(*tail) {
            *tail = Some(self.begin(*tail, scope, user));
        }
        let page = self.number(*tail).expect("a page with room");
        let place = page * PAGE + self.pages[page].len as usize;
        self.tokens[place] = token;
        self.pages[page].len += 1;
        self.num_tokens += 1;
        place
    }

    /// Gives back the pages of a text that nobody else has: they are the next to be written.
    pub(crate) fn free(&mut self, tail: Option<PageRef>) {
        let mut end = self.end(tail);
        while let Some(place) = end {
            let page = place / PAGE;
            end = self.before(page * PAGE);
            self.erase(page);
            if page as u32 != self.oldest {
                self.unlink(page as u32);
                let oldest = self.oldest;
                self.pages[page].newer = oldest;
                self.pages[page].older = NONE;
                self.pages[oldest as usize].older = page as u32;
                self.oldest = page as u32;
            }
        }
    }
}
