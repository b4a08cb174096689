-- Set while an admin has suspended the walker: the walker's own actions are refused.
ALTER TABLE walkers ADD COLUMN suspended_at timestamptz;

-- True if the decision of a review suspended the walker. The decision is then a rejection.
ALTER TABLE walk_reviews ADD COLUMN suspended boolean NOT NULL DEFAULT FALSE;

-- When the job was enqueued that sends the webhook about an open review.
ALTER TABLE walk_reviews ADD COLUMN announced_at timestamptz;
