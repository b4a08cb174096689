-- Records which jobs were published. Rows that another transaction has locked are skipped: waiting for
-- them could deadlock, and publishing them once more does no harm. A job that was dead-lettered and
-- requeued meanwhile is another row (seq), which has not been published.
CREATE OR REPLACE FUNCTION onceward_mark_published(
    p_tenants text[], p_ids uuid[], p_seqs bigint[], p_published integer[]
) RETURNS void LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    UPDATE onceward_jobs AS job
       SET published = greatest(job.published, free.published),
           published_at = statement_timestamp()
      FROM (SELECT found.tenant, found.id, named.published
              FROM unnest(p_tenants, p_ids, p_seqs, p_published)
                   AS named(tenant, id, seq, published)
              JOIN onceward_jobs AS found
                ON found.tenant = named.tenant AND found.id = named.id AND found.seq = named.seq
             WHERE found.published < named.published OR found.published_at IS NULL
               FOR UPDATE OF found SKIP LOCKED) AS free
     WHERE job.tenant = free.tenant AND job.id = free.id;
END $$;
