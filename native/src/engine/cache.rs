//! An LRU cache of table blocks, bounded in bytes.

use async_trait::async_trait;
use lru::LruCache;
use parking_lot::Mutex;
use slatedb::Error;
use slatedb::db_cache::{CachedEntry, CachedKey, DbCache};

/// Bytes of memory that an entry takes besides its content.
const OVERHEAD: usize = 200;

pub struct BlockCache {
    capacity: usize,
    content: Mutex<Content>,
}

struct Content {
    entries: LruCache<CachedKey, (CachedEntry, usize)>,
    size: usize,
}

impl BlockCache {
    pub fn new(capacity: usize) -> Self {
        Self { capacity, content: Mutex::new(Content { entries: LruCache::unbounded(), size: 0 }) }
    }

    fn get(&self, key: &CachedKey) -> Result<Option<CachedEntry>, Error> {
        Ok(self.content.lock().entries.get(key).map(|(entry, _)| entry.clone()))
    }
}

#[async_trait]
impl DbCache for BlockCache {
    async fn get_block(&self, key: &CachedKey) -> Result<Option<CachedEntry>, Error> {
        self.get(key)
    }

    async fn get_index(&self, key: &CachedKey) -> Result<Option<CachedEntry>, Error> {
        self.get(key)
    }

    async fn get_filter(&self, key: &CachedKey) -> Result<Option<CachedEntry>, Error> {
        self.get(key)
    }

    async fn get_stats(&self, key: &CachedKey) -> Result<Option<CachedEntry>, Error> {
        self.get(key)
    }

    async fn insert(&self, key: CachedKey, value: CachedEntry) {
        // A block is a slice of a larger buffer, and would keep all of it alive.
        let value = value.clamp_allocated_size();
        let size = value.size() + OVERHEAD;
        if size > self.capacity {
            return;
        }
        let mut content = self.content.lock();
        content.size += size;
        if let Some((_, (_, former))) = content.entries.push(key, (value, size)) {
            content.size -= former;
        }
        while content.size > self.capacity
            && let Some((_, (_, oldest))) = content.entries.pop_lru()
        {
            content.size -= oldest;
        }
    }

    async fn remove(&self, key: &CachedKey) {
        let mut content = self.content.lock();
        if let Some((_, size)) = content.entries.pop(key) {
            content.size -= size;
        }
    }

    fn entry_count(&self) -> u64 {
        self.content.lock().entries.len() as u64
    }
}
