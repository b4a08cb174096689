-- Records which jobs were published. Rows that another transaction has locked are skipped: waiting for
-- them could deadlock, and publishing them once more does no harm. A job that was dead-lettered and
-- requeued meanwhile is another row (seq), which has not been published.
CREATE OR REPLACE FUNCTION onceward_mark_published(
    p_tenants text[], p_ids uuid[], p_seqs bigint[], p_published integer[]
) RETURNS void LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_tenant text;
    v_ids uuid[];
    v_seqs bigint[];
    v_published integer[];
BEGIN
    FOR v_tenant, v_ids, v_seqs, v_published IN
        SELECT named.tenant, array_agg(named.id), array_agg(named.seq), array_agg(named.published)
          FROM unnest(p_tenants, p_ids, p_seqs, p_published) AS named(tenant, id, seq, published)
         GROUP BY named.tenant
    LOOP
        UPDATE onceward_jobs AS job
           SET published = greatest(
                   job.published, v_published[array_position(v_ids, job.id)]),
               published_at = statement_timestamp()
          FROM (SELECT id FROM onceward_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids)
                   AND seq = v_seqs[array_position(v_ids, id)]
                   AND (published < v_published[array_position(v_ids, id)]
                        OR published_at IS NULL)
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id;
    END LOOP;
END $$;
