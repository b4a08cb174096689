-- Set while an admin has suspended the walker: the walker's own actions are refused.
ALTER TABLE walkers ADD COLUMN suspended_at TEXT;

-- True if the decision of a review suspended the walker. The decision is then a rejection.
ALTER TABLE walk_reviews ADD COLUMN suspended INTEGER NOT NULL DEFAULT 0
    CHECK (suspended IN (0, 1));

-- When the job was enqueued that sends the webhook about an open review.
ALTER TABLE walk_reviews ADD COLUMN announced_at TEXT;
