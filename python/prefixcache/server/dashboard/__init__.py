"""`/dashboard`: the cache on one page, for administrators."""
